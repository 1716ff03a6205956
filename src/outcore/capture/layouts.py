"""How kernels lay out their results, where torch describes it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache

LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default
SLICE_SCATTER = torch.ops.aten.slice_scatter.default


@contextmanager
def kernel_layouts() -> Iterator[None]:
    """Let fake tensors be laid out as the kernels, on CPUs and GPUs, will lay out the real ones.

    For two ops of transformers on volumes, whose results have views. (Results without are corrected
    when they turn up: `MismatchError`.)
    """
    described = decomposition_table[LAYER_NORM]
    impl = op_implementations_dict[SLICE_SCATTER]
    cache_key = FakeTensorMode._cache_key

    @wraps(described)  # torch asks where it comes from
    def layer_norm(*args: Any, **kwargs: Any) -> Any:
        """The gradient of a permuted input is contiguous, and described as laid out like it."""
        gradient, *others = described(*args, **kwargs)
        return (None if gradient is None else gradient.contiguous(), *others)

    def slice_scatter(mode: FakeTensorMode, op: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
        """The result is a view of a copy of all of the input's storage."""
        if any(n > 1 and not stride for n, stride in zip(into.shape, into.stride(), strict=True)):
            return impl(mode, op, into, *args, **kwargs)  # what overlaps itself is copied alone
        with mode:
            elements = into.untyped_storage().nbytes() // into.itemsize
            whole = into.as_strided((elements,), (1,), 0).clone()
            return whole.as_strided(into.size(), into.stride(), into.storage_offset())

    def key(self: FakeTensorMode, state: Any, op: Any, *args: Any) -> Any:
        """What is remembered of a result is its size and strides, not where it begins."""
        if op is SLICE_SCATTER:
            raise _BypassDispatchCache("begins anywhere in its storage")
        return cache_key(self, state, op, *args)

    decomposition_table[LAYER_NORM] = layer_norm
    op_implementations_dict[SLICE_SCATTER] = slice_scatter
    FakeTensorMode._cache_key = key  # type: ignore[assignment, method-assign]  # until the end
    try:
        yield
    finally:
        decomposition_table[LAYER_NORM] = described
        op_implementations_dict[SLICE_SCATTER] = impl
        FakeTensorMode._cache_key = cache_key  # type: ignore[method-assign]  # as it was
