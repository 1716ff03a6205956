"""layouts: correct fake tensors whose layouts differ from those that real kernels return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache

from outcore import aten

LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default
WRITES = tuple(map(aten.resolve, aten.WRITES))
VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default


@contextmanager
def layouts() -> Iterator[None]:
    """While open, let fake tensors have the layouts that kernels on CPUs and GPUs really return.

    Covers views and those ops of transformers on volumes that one step has many of. Other
    differences are corrected when they are found (`recapture.py`).
    """
    described = decomposition_table[LAYER_NORM]
    impls = {op: op_implementations_dict.get(op) for op in (*WRITES, *VIEWS)}
    cache_key = FakeTensorMode._cache_key

    @wraps(described)  # torch looks at where the function comes from
    def layer_norm(*args: Any, **kwargs: Any) -> Any:
        """Correct the gradient of a permuted input: torch describes it with the input's layout.

        The kernel returns a contiguous one.
        """
        gradient, *others = described(*args, **kwargs)
        return (None if gradient is None else gradient.contiguous(), *others)

    def write(mode: FakeTensorMode, op: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
        """The result: a view of a copy of the whole storage that is written into."""
        nbytes, impl = into.untyped_storage().nbytes(), impls[op]
        sides = zip(into.shape, into.stride(), strict=True)
        if not nbytes or any(n > 1 and not stride for n, stride in sides):
            # Of a tensor that overlaps itself, only the tensor is copied.
            return NotImplemented if impl is None else impl(mode, op, into, *args, **kwargs)
        with mode:
            whole = into.as_strided((nbytes // into.itemsize,), (1,), 0).clone()
            return whole.as_strided(into.size(), into.stride(), into.storage_offset())

    def view(mode: FakeTensorMode, op: Any, whole: Any, *shape: Any) -> Any:
        """The view with a real view's strides in dimensions of size 1: some kernels use them."""
        made = impls[op](mode, op, whole, *shape)  # type: ignore[misc]  # torch has both
        sizes = (*whole.shape, *whole.stride(), *made.shape)
        if not all(isinstance(n, int) for n in sizes) or 1 not in made.shape:
            return made
        with no_python_dispatcher():  # which describes views of meta tensors in the same way
            real = torch.empty_strided(whole.shape, whole.stride(), device="meta").view(made.shape)
        with mode:
            return whole.as_strided(real.shape, real.stride(), whole.storage_offset())

    def key(self: FakeTensorMode, state: Any, op: Any, *args: Any) -> Any:
        """Bypass torch's cache for these ops: it may hold entries made without these patches."""
        if op in impls or op is LAYER_NORM:
            raise _BypassDispatchCache("laid out as its kernel does it")
        return cache_key(self, state, op, *args)

    decomposition_table[LAYER_NORM] = layer_norm
    op_implementations_dict.update(dict.fromkeys(WRITES, write) | dict.fromkeys(VIEWS, view))
    FakeTensorMode._cache_key = key  # type: ignore[assignment, method-assign]  # until the end
    try:
        yield
    finally:
        decomposition_table[LAYER_NORM] = described
        for op, impl in impls.items():
            op_implementations_dict.pop(op)
            if impl is not None:
                op_implementations_dict[op] = impl
        FakeTensorMode._cache_key = cache_key  # type: ignore[method-assign]  # as it was
