"""undecomposed: keep ops whole that torch's tracing decomposes and plain PyTorch does not.

Plain PyTorch runs one kernel for each. While AOTAutograd traces, resampling becomes indexing and
arithmetic on whole maps: that is slower, needs more memory and gives other bits, and its backward
sums in any order (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import DispatchKey
from torch._ops import OpOverload

RESAMPLING = ("upsample_", "_upsample_")
"""Prefixes of the names of resampling ops."""
SHRINKING = ("softshrink", "hardshrink")
"""Prefixes of the names of shrinking ops."""

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Dispatch keys at which a decomposition in Python precedes the kernel."""


@contextmanager
def whole_ops() -> Iterator[None]:
    """While open, let torch trace these ops themselves."""
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
    """Return all overloads of these ops; only forward ones, which torch decomposes in Python."""
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
