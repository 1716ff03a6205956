"""undecomposed: keep ops whole that torch's tracing decomposes and plain PyTorch does not.

Plain PyTorch runs one kernel for each. While AOTAutograd traces, resampling becomes indexing and
arithmetic on whole maps: that is slower, needs more memory and gives other bits, and its backward
sums in any order (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import DispatchKey, Tensor
from torch._decomp import decomposition_table, meta_table
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict
from torch.utils._pytree import tree_leaves

from outcore.capture.compiler.compat import suggest_memory_format

RESAMPLING = ("upsample_", "_upsample_")
"""Prefixes of the names of resampling ops."""
SHRINKING = ("softshrink", "hardshrink")
"""Prefixes of the names of shrinking ops."""

SHAPE = "input_size"
"""Name of the argument of a resampling op's backward that gives the sizes of the result."""
AS_GIVEN = "upsample_bilinear2d_backward", "upsample_trilinear3d_backward"
"""Those of these that return a result in the memory format of the gradient they get, which torch
cannot describe; the others return a contiguous one."""

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
    for op, key, _ in hidden:
        if op._overloadname == "vec":
            op.py_kernels[key] = _by_sizes(op)
        op._dispatch_cache.clear()
    undescribed = [op for op in _backwards() if op not in op_implementations_dict]
    op_implementations_dict.update(dict.fromkeys(undescribed, _of_symbolic_sizes))
    try:
        yield
    finally:
        for op in undescribed:
            op_implementations_dict.pop(op)
        for op, key, description in hidden:
            op.py_kernels[key] = description
            op._dispatch_cache.clear()


@cache
def _by_sizes(op: OpOverload) -> Callable[..., Any]:
    """Call the overload that takes each size and factor by itself, as torch's own code does.

    That code, in C++, takes no symbolic sizes: it fails, or has torch compile anew for each size.
    """
    whole: OpOverload = op.overloadpacket.default

    def resampled(of: Tensor, sizes: Any, *corners_and_factors: Any) -> Any:
        *corners, factors = corners_and_factors
        made: Any = upsample_compute_output_size(of.shape, sizes, factors)  # type: ignore[no-untyped-call]  # torch leaves it so
        return whole(of, made, *corners, *(factors or [None] * len(made)))

    return resampled


def _of_symbolic_sizes(
    mode: FakeTensorMode, op: OpOverload, gradient: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The result of a resampling op's backward: torch's description takes only numbers."""
    given = {a.name: arg for a, arg in zip(op._schema.arguments[1:], args, strict=False)} | kwargs
    symbolic = (torch.SymInt, torch.SymFloat)
    if not any(isinstance(n, symbolic) for n in tree_leaves(given) + list(gradient.shape)):
        return NotImplemented
    as_given = op._opname in AS_GIVEN
    lies = suggest_memory_format(gradient) if as_given else torch.contiguous_format
    with mode:
        return torch.empty(
            given[SHAPE], dtype=gradient.dtype, device=gradient.device, memory_format=lies
        )


@cache
def _backwards() -> tuple[OpOverload, ...]:
    """Return the backward ops of resampling that torch cannot describe with symbolic sizes."""
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.removeprefix("aten::").startswith(RESAMPLING)
        and name.startswith("aten::")
        and name.endswith("_backward")
    ]
    ops = map(_overload, names)
    return tuple(op for op in ops if op not in meta_table and op not in decomposition_table)


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
