"""Gradients of pooling and padding by CUDA's kernels, without the input (docs/decisions/0032)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outcore.capture.rewrites.pooling import GRADIENTS
from tests.gpu.training import peak_bytes

ATEN = torch.ops.aten
SIDES = {1: (8, 64, 4096), 2: (8, 64, 96, 96), 3: (2, 32, 24, 24, 24)}
LAST = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
MIB = 1 << 20


def cases() -> Iterator[Any]:
    """Ops, with the other arguments of the op and of its gradient.

    Windows do not overlap, and padding adds one number to another: atomics add in any order, so
    sums of more numbers would vary.
    """
    for sides in SIDES:
        for kind in ("reflection", "replication"):
            name, told_both = f"{kind}_pad{sides}d", [[1, 0] + [0] * (2 * sides - 2)]
            yield pytest.param(sides, name, told_both, told_both, id=name)
        if sides == 1:
            continue  # pooling is tested in two and three dimensions
        two, one, none = [2] * sides, [1] * sides, [0] * sides
        told: dict[str, tuple[list[Any], list[Any]]] = {
            f"max_pool{sides}d_with_indices": ([two, two, none, one, False],) * 2,
            f"avg_pool{sides}d": ([two, two, none, False, True, None],) * 2,
            f"_adaptive_avg_pool{sides}d": ([[side // 2 for side in SIDES[sides][2:]]], []),
            f"fractional_max_pool{sides}d": ([two, [side // 2 for side in SIDES[sides][2:]]],) * 2,
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
    if name.startswith("fractional"):
        samples = torch.full((*x.shape[:2], sides), 0.5, device="cuda", dtype=dtype)
        forward = [*forward, samples]
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
