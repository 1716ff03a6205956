"""donating: run ops out of place and written over an argument, for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outcore import aten

_ALL = [(target, given) for target, (given_, _) in aten.DONATIONS.items() for given in given_]
ELEMENTWISE = [pair for pair in _ALL if pair[0] not in aten.IN_ORDER]
ROWS = [pair for pair in _ALL if pair[0] in aten.IN_ORDER and pair[0] != aten.CROSS_ENTROPY]
"""(target, position of the argument that is written over)."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

SHAPES = [
    *[(), (1,), (7,), (1, 5), (5, 1), (0, 4), (37, 65), (3, 4, 5), (4, 7, 1), (5, 33, 129)],
    *[(2, 3, 17, 33), (300, 15), (8, 128, 128), (3, 1000), (2, 1024), (3, 1025), (5, 2049)],
    *[(3, 4096), (2, 9000), (3, 50257), (50257, 2), (2, 32000), (2, 40000, 3), (130, 1025, 2)],
]
"""Rows that fit in one warp, that fit in shared memory and that do not; rows that begin at
unaligned addresses; and columns."""


def written(target: str, given: int, args: Sequence[Any]) -> Tensor:
    """The result of `target`, written over a copy of the argument at position `given`."""
    _, out = aten.DONATIONS[target]
    args = [*args]
    over: Tensor = args[given].clone()
    args[given] = over
    found: Tensor = aten.in_place(target)(*args, **({out: over} if out else {}))
    assert found is over
    return over


def bits(tensor: Tensor) -> Tensor:
    """The values' bits as integers, so that NaNs and signs of zeros are compared, too."""
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return tensor.contiguous().view(sizes[tensor.itemsize])


def random(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Random numbers that are the same on each device."""
    seeded = torch.Generator().manual_seed(seed)
    made: Tensor = torch.randn(shape, generator=seeded, dtype=torch.float64).to(device, dtype)
    return made


def elementwise(target: str, given: int, dtype: torch.dtype, device: str) -> Iterator[Any]:
    """Yield (result, result written over an argument, case), for several layouts and numbers."""
    op = aten.resolve(target)
    kinds = [str(a.type) for a in op._schema.arguments if a.default_value is None]
    for shape, number in product([(37, 65), (7, 4, 3, 5), ()], [0.1, 1 / 3, 2.7]):
        tensors = [random(shape, dtype, device, seed) for seed, _ in enumerate(kinds)]
        for turned in (False, True):
            laid = [t.transpose(0, 1) if turned and t.dim() > 1 else t for t in tensors]
            numbers = {"bool": False}
            args: list[Any] = [
                t if k == "Tensor" else numbers.get(k, number)
                for t, k in zip(laid, kinds, strict=True)
            ]
            yield op(*args), written(target, given, args), (shape, number, turned)


def rows(target: str, given: int, dtype: torch.dtype, device: str) -> Iterator[Any]:
    """The same for softmax and similar ops, in each dimension; some rows have infinities."""
    op = aten.resolve(target)
    for shape, scale in product(SHAPES, (1, 30)):
        x = random(shape, dtype, device, 0) * scale
        if scale > 1 and x.numel() > 1:
            x.view(-1)[1] = -torch.inf
        for dim in range(max(len(shape), 1)):
            args = rows_given(target, x, dim)
            yield op(*args), written(target, given, args), (shape, scale, dim)


def rows_given(target: str, x: Tensor, dim: int) -> list[Any]:
    """Arguments of softmax or of its gradient, made from `x`."""
    forward = target.replace("_backward_data", "")
    if target == forward:
        return [x, dim, False]
    made = aten.resolve(forward)(x, dim, False)
    return [random(x.shape, x.dtype, x.device.type, 1), made, dim, x.dtype]
