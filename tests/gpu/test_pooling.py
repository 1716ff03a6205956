"""Gradients of pooling without the input, by CUDA's kernels (docs/decisions/0032)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outcore.capture.pooling import GRADIENTS
from tests.gpu.training import peak_bytes

ATEN = torch.ops.aten
SIDES = {2: (8, 64, 96, 96), 3: (2, 32, 24, 24, 24)}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
MIB = 1 << 20


def cases() -> Iterator[Any]:
    """Ops, and what they and their gradients are told.

    Windows do not overlap: what is added by atomics would be added in any order.
    """
    for sides in SIDES:
        two, one, none = [2] * sides, [1] * sides, [0] * sides
        told: dict[str, tuple[list[Any], list[Any]]] = {
            f"max_pool{sides}d_with_indices": ([two, two, none, one, False],) * 2,
            f"avg_pool{sides}d": ([two, two, none, False, True, None],) * 2,
            f"_adaptive_avg_pool{sides}d": ([[side // 2 for side in SIDES[sides][2:]]], []),
            f"adaptive_max_pool{sides}d": ([[side // 2 for side in SIDES[sides][2:]]], []),
        }
        for name, (forward, backward) in told.items():
            yield pytest.param(sides, name, forward, backward, id=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("sides", "name", "forward", "backward"), [*cases()])
def test_the_gradient_without_the_input(
    sides: int,
    name: str,
    forward: list[Any],
    backward: list[Any],
    last: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(SIDES[sides], device="cuda", dtype=dtype)
    x = x.to(memory_format=LAST[sides]) if last else x
    results = getattr(ATEN, name)(x, *forward)
    result, *indices = results if isinstance(results, tuple) else (results,)
    tangents = torch.randn_like(result)
    theirs = getattr(ATEN, f"{name}_backward").default
    given = x.shape, x.stride()

    def whole() -> Tensor:
        made: Tensor = theirs(tangents, x, *backward, *indices)
        return made

    def alone() -> Tensor:
        made: Tensor = GRADIENTS[theirs](tangents, *given, *backward, *indices)
        return made

    expected, with_input = peak_bytes(whole)
    found, without = peak_bytes(alone)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert without <= with_input + MIB
