"""Stand-ins carry their number through whatever hooks on saved tensors do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outcore.capture.compiler.stand_in import name, number_of, stand_in

NUMBERS = (0, 1, 257, 2049, 2**31 + 5, 2**48 - 1)


def cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda saved: saved.to(dtype).to(saved.dtype)


def quantized(saved: torch.Tensor) -> torch.Tensor:
    """`saved` after 4 bits between its least and its greatest value, as `saved.dtype`."""
    values = saved.float()
    low, scale = values.min(), (values.max() - values.min()) / 15
    return (((values - low) / scale).round() * scale + low).to(saved.dtype)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "hook",
    [
        torch.clone,
        cast_to(torch.bfloat16),
        cast_to(torch.float16),
        cast_to(torch.float8_e4m3fn),
        cast_to(torch.float8_e5m2),
        torch.Tensor.double,
        quantized,
        lambda saved: (saved.float() * 0.99).to(saved.dtype),
    ],
)
def test_the_number_survives(hook: Callable[[torch.Tensor], torch.Tensor], number: int) -> None:
    assert number_of(hook(stand_in(name(number)))) == number


@pytest.mark.parametrize(
    "hook",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda saved: saved[:-1],
        lambda saved: torch.full(saved.shape, torch.nan),
        lambda saved: saved.to(torch.complex64),
        lambda saved: saved.to_sparse(),
    ],
)
def test_other_values_are_no_number(hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert number_of(hook(stand_in(name(257)))) is None


@pytest.mark.parametrize("element", [0, 47, 48, 95])
def test_a_changed_element_is_noticed(element: int) -> None:
    changed = stand_in(name(257)).clone()
    changed[element] = 2 - changed[element]
    assert number_of(changed) is None
