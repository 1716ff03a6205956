"""laid: give results the layout that the trace says, and read memory as another dtype.

Generated code calls these functions.
"""

from __future__ import annotations

import warnings

import torch

from outcore.errors import StepError
from outcore.ir.trace import Trace

RELAID = (
    "outcore: a result of {op} at {site} lies in memory otherwise than it did in the first steps; "
    "it is copied, which takes time, and more memory than planned"
)


def relaid(trace: Trace, op: int, value: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a result of an op as it was captured; a copy, unless only sides of 1 lie differently.

    Warns of a copy: plans have no room for it. Raises StepError if its shape or dtype differs.
    """
    captured, source = trace.values[value], trace.ops[op]
    if tuple(tensor.shape) != captured.shape or str(tensor.dtype) != f"torch.{captured.dtype}":
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        before = f"torch.{captured.dtype} {captured.shape}"
        raise StepError(reason=f"{source.target} at {source.site} returned {found}, not {before}")
    if tensor.storage_offset() == captured.offset:
        if tensor.stride() == captured.stride:
            return tensor
        pairs = zip(captured.shape, tensor.stride(), captured.stride, strict=True)
        if all(lies == lay or side == 1 for side, lies, lay in pairs):
            return tensor.as_strided(captured.shape, captured.stride, captured.offset)
    warnings.warn(RELAID.format(op=source.target, site=source.site), stacklevel=2)
    nbytes = trace.buffers[captured.buffer].nbytes
    return _copied(tensor, nbytes, captured.shape, captured.stride, captured.offset)


def laid(
    tensor: torch.Tensor, nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return `tensor` at `offset` in a storage of `nbytes`: itself if it is there, else a copy."""
    if tensor.storage_offset() == offset and tensor.untyped_storage().nbytes() == nbytes:
        return tensor
    return _copied(tensor, nbytes, shape, stride, offset)


def _copied(
    tensor: torch.Tensor, nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    whole = tensor.new_empty(nbytes // tensor.itemsize)
    return whole.as_strided(shape, stride, offset).copy_(tensor)


def reinterpret(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    start_bytes: int,
) -> torch.Tensor:
    """A view of `tensor`'s storage as another dtype, from `start_bytes` after its first element."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    offset = tensor.storage_offset() * tensor.itemsize + start_bytes
    return view.set_(tensor.untyped_storage(), offset // dtype.itemsize, shape, stride)
