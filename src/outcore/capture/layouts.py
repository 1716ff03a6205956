"""How kernels lay out their results, where torch describes it otherwise."""

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
    """Let fake tensors be laid out as the kernels, on CPUs and GPUs, will lay out the real ones.

    For views, and ops of transformers on volumes, of which one step has many. (Others are described
    anew when they turn up: `again.py`.)
    """
    described = decomposition_table[LAYER_NORM]
    impls = {op: op_implementations_dict.get(op) for op in (*WRITES, *VIEWS)}
    cache_key = FakeTensorMode._cache_key

    @wraps(described)  # torch asks where it comes from
    def layer_norm(*args: Any, **kwargs: Any) -> Any:
        """The gradient of a permuted input is contiguous, and described as laid out like it."""
        gradient, *others = described(*args, **kwargs)
        return (None if gradient is None else gradient.contiguous(), *others)

    def write(mode: FakeTensorMode, op: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
        """The result is a view of a copy of all of the storage that is written into."""
        nbytes, impl = into.untyped_storage().nbytes(), impls[op]
        sides = zip(into.shape, into.stride(), strict=True)
        if not nbytes or any(n > 1 and not stride for n, stride in sides):
            # What overlaps itself is copied alone.
            return NotImplemented if impl is None else impl(mode, op, into, *args, **kwargs)
        with mode:
            whole = into.as_strided((nbytes // into.itemsize,), (1,), 0).clone()
            return whole.as_strided(into.size(), into.stride(), into.storage_offset())

    def view(mode: FakeTensorMode, op: Any, whole: Any, *shape: Any) -> Any:
        """Sides of 1 have strides too, those of real views: some kernels go by them."""
        made = impls[op](mode, op, whole, *shape)  # type: ignore[misc]  # torch has both
        sizes = (*whole.shape, *whole.stride(), *made.shape)
        if not all(isinstance(n, int) for n in sizes) or 1 not in made.shape:
            return made
        with no_python_dispatcher():  # which describes views of meta tensors in the same way
            real = torch.empty_strided(whole.shape, whole.stride(), device="meta").view(made.shape)
        with mode:
            return whole.as_strided(real.shape, real.stride(), whole.storage_offset())

    def key(self: FakeTensorMode, state: Any, op: Any, *args: Any) -> Any:
        """What is remembered may be of a trace that was described as torch does it."""
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
