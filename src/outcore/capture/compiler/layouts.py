"""layouts: correct fake tensors whose layouts differ from those that real kernels return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache

from outcore import aten

LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default
BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten._native_batch_norm_legit.default: 0,
    torch.ops.aten._native_batch_norm_legit.no_stats: 0,
    torch.ops.aten._native_batch_norm_legit_functional.default: 0,
    torch.ops.aten._native_batch_norm_legit_no_training.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
}
"""Batch norm and its gradient -> the position of its input. Their first result is like that."""
WRITES = tuple(map(aten.resolve, aten.WRITES))
VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default

Impl: TypeAlias = Callable[..., Any]


@contextmanager
def layouts() -> Iterator[None]:
    """While open, let fake tensors have the layouts that kernels on CPUs and GPUs really return.

    Covers views and those ops of transformers on volumes that one step has many of. Other
    differences are corrected when they are found (`recapture.py`).
    """
    norms: dict[Any, Any] = {op: decomposition_table[op] for op in (LAYER_NORM, *BATCH_NORMS)}
    impls: dict[Any, Any] = {op: op_implementations_dict.get(op) for op in (*WRITES, *VIEWS)}
    cache_key = FakeTensorMode._cache_key

    def key(self: FakeTensorMode, state: Any, op: Any, *args: Any) -> Any:
        """Bypass torch's cache for these ops: it may hold entries made without these patches."""
        if op in impls or op in norms:
            raise _BypassDispatchCache("laid out as its kernel does it")
        return cache_key(self, state, op, *args)

    decomposition_table[LAYER_NORM] = _layer_norm(norms[LAYER_NORM])
    for op, position in BATCH_NORMS.items():
        decomposition_table[op] = _batch_norm(norms[op], position)
    op_implementations_dict.update({op: _write(impls[op]) for op in WRITES})
    op_implementations_dict.update({op: _view(impls[op]) for op in VIEWS})
    FakeTensorMode._cache_key = key  # type: ignore[assignment, method-assign]  # until the end
    try:
        yield
    finally:
        decomposition_table.update(norms)
        for op, impl in impls.items():
            op_implementations_dict.pop(op)
            if impl is not None:
                op_implementations_dict[op] = impl
        FakeTensorMode._cache_key = cache_key  # type: ignore[method-assign]  # as it was


def _layer_norm(described: Impl) -> Impl:
    @wraps(described)  # torch looks at where the function comes from
    def layer_norm(*args: Any, **kwargs: Any) -> Any:
        """Correct the gradient of a permuted input: torch describes it with the input's layout.

        The kernel returns a contiguous one.
        """
        gradient, *others = described(*args, **kwargs)
        return (None if gradient is None else gradient.contiguous(), *others)

    return layer_norm


def _batch_norm(described: Impl, position: int) -> Impl:
    @wraps(described)
    def batch_norm(*args: Any, **kwargs: Any) -> Any:
        """Correct the first result on a CPU: torch describes it with the input's layout.

        The kernel's is contiguous, or channels last if the input is.
        """
        made, *others = described(*args, **kwargs)
        given = args[position]
        if made is not None and given.device.type == "cpu":
            made = made.contiguous(memory_format=suggest_memory_format(given))
        return (made, *others)

    return batch_norm


def _write(impl: Impl | None) -> Impl:
    def write(mode: FakeTensorMode, op: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
        """The result: a view of a copy of the whole storage that is written into."""
        nbytes = into.untyped_storage().nbytes()
        sides = zip(into.shape, into.stride(), strict=True)
        if not nbytes or any(n > 1 and not stride for n, stride in sides):
            # Of a tensor that overlaps itself, only the tensor is copied.
            return NotImplemented if impl is None else impl(mode, op, into, *args, **kwargs)
        with mode:
            whole = into.as_strided((nbytes // into.itemsize,), (1,), 0).clone()
            return whole.as_strided(into.size(), into.stride(), into.storage_offset())

    return write


def _view(impl: Impl) -> Impl:
    def view(mode: FakeTensorMode, op: Any, whole: Any, *shape: Any) -> Any:
        """The view with a real view's strides in dimensions of size 1: some kernels use them."""
        made = impl(mode, op, whole, *shape)
        sizes = (*whole.shape, *whole.stride(), *made.shape)
        if not all(isinstance(n, int) for n in sizes) or 1 not in made.shape:
            return made
        with no_python_dispatcher():  # which describes views of meta tensors in the same way
            real = torch.empty_strided(whole.shape, whole.stride(), device="meta").view(made.shape)
        with mode:
            return whole.as_strided(real.shape, real.stride(), whole.storage_offset())

    return view
