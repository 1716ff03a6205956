"""scores: make arguments for the gradient of cross-entropy, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.cpu.donating import random

ATEN = torch.ops.aten
IGNORED = -100

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
SHAPES = [
    (0, 5),
    (1, 7),
    (15, 3),
    (16, 8),
    (33, 1),
    (100, 7),
    (257, 1000),
    (300, 1025),
    (70, 50257),
]
"""Rows and classes: too few rows for a block, a last block that is not full, odd row lengths."""


def given(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    *,
    reduction: str = "mean",
    weighted: bool = False,
    ignored: int = 3,
) -> list[Any]:
    """Arguments of the op; every `ignored`-th row has the ignored class (0: no row)."""
    rows, classes = shape
    scores = random(shape, dtype, device, 0) * 4
    if rows and classes > 1:
        scores[0, 1] = -torch.inf
    seeded = torch.Generator().manual_seed(2)
    target = torch.randint(0, classes, (rows,), generator=seeded).to(device)
    if ignored:
        target[::ignored] = IGNORED
    output = ATEN._log_softmax(scores, 1, False)
    weight = random((classes,), dtype, device, 3).abs() if weighted else None
    told = weight, REDUCTIONS[reduction], IGNORED
    _, total = ATEN.nll_loss_forward(output, target, *told)
    gradient = random((rows,) if reduction == "none" else (), dtype, device, 4)
    return [gradient, output, target, *told, total]


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[list[Any], Any]]:
    """Yield arguments of the op, and the case that they are."""
    for kind in product(SHAPES, REDUCTIONS, (False, True), (0, 1, 3)):
        shape, reduction, weighted, ignored = kind
        args = given(shape, dtype, device, reduction=reduction, weighted=weighted, ignored=ignored)
        yield args, kind


def by_torch(gradient: Tensor, output: Tensor, *rest: Any) -> Tensor:
    """The gradient of the scores by torch's two ops."""
    of_loss = ATEN.nll_loss_backward(gradient, output, *rest)
    made: Tensor = ATEN._log_softmax_backward_data(of_loss, output, 1, output.dtype)
    return made
