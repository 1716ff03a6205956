"""How kernels lay out their results, where torch describes it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._decomp import decomposition_table

LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default


@contextmanager
def kernel_layouts() -> Iterator[None]:
    """Let fake tensors be laid out as the kernels will lay out the real ones.

    For layer norm's gradient of an input that is not contiguous (permuted to have its channels
    last, in many transformers on images and volumes). Its kernels, on CPUs and GPUs, give a
    contiguous one, and torch describes one that is laid out like the input. Other results are
    corrected when they turn up (`MismatchError`), which is too late where there are views of them.
    """
    described = decomposition_table[LAYER_NORM]

    @wraps(described)  # torch looks at where it comes from
    def contiguous(*args: Any, **kwargs: Any) -> Any:
        gradient, *others = described(*args, **kwargs)
        return (None if gradient is None else gradient.contiguous(), *others)

    decomposition_table[LAYER_NORM] = contiguous
    try:
        yield
    finally:
        decomposition_table[LAYER_NORM] = described
