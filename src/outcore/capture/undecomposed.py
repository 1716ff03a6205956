"""Ops kept whole that torch's tracing takes apart, although plain PyTorch runs one kernel for each.

Resampling becomes indexing and arithmetic on whole maps while AOTAutograd traces: slower, with more
in memory, with other bits, and its backward adds up in any order (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import DispatchKey
from torch._ops import OpOverload

RESAMPLING = ("upsample_", "_upsample_")
SHRINKING = ("softshrink", "hardshrink")
"""What names of such ops begin with."""

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Where a description in Python stands before the kernel."""


@contextmanager
def whole_ops() -> Iterator[None]:
    """Let torch trace these ops themselves."""
    hidden = [
        (op, key, op.py_kernels.pop(key))
        for op in _taken_apart()
        for key in KEYS
        if key in op.py_kernels
    ]
    for op, _, _ in hidden:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, description in hidden:
            op.py_kernels[key] = description
            op._dispatch_cache.clear()


@cache
def _taken_apart() -> tuple[OpOverload, ...]:
    """All overloads of such ops, forward ones alone: torch describes those in Python."""
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.removeprefix("aten::").startswith((*RESAMPLING, *SHRINKING))
        and name.startswith("aten::")
        and "backward" not in name
    ]
    return tuple(map(_overload, names))


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found
