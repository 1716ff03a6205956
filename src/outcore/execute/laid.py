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


def as_declared(trace: Trace, op: int, value: int, tensor: torch.Tensor) -> torch.Tensor:
    """A result of an op that is not torch's, without conj and neg bits: captured ones have none.

    Raises StepError if its shape or dtype differs from before.
    """
    captured, source = trace.values[value], trace.ops[op]
    if tuple(tensor.shape) != captured.shape or str(tensor.dtype) != f"torch.{captured.dtype}":
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        before = f"torch.{captured.dtype} {captured.shape}"
        raise StepError(reason=f"{source.target} at {source.site} returned {found}, not {before}")
    return tensor.resolve_conj().resolve_neg()


def relaid(trace: Trace, op: int, value: int, tensor: torch.Tensor) -> torch.Tensor:
    """A result whose bytes are read as captured: itself if it lies as captured, else a copy.

    Warns if strides differ: plans have no room for copies. Raises StepError as `as_declared`, and
    if several elements were one in memory as the result was captured.
    """
    tensor = as_declared(trace, op, value, tensor)
    captured, source = trace.values[value], trace.ops[op]
    shape, stride, offset = captured.shape, captured.stride, captured.offset
    nbytes = trace.buffers[captured.buffer].nbytes
    here = tensor.storage_offset() == offset and tensor.untyped_storage().nbytes() >= nbytes
    if here and tensor.stride() == stride:
        return tensor
    pairs = zip(shape, tensor.stride(), stride, strict=True)
    alike = all(lies == lay or side == 1 for side, lies, lay in pairs) or not tensor.numel()
    if here and alike:
        return _owned(tensor.as_strided(shape, stride, offset))
    if any(side > 1 and lay == 0 for side, lay in zip(shape, stride, strict=True)):
        place = f"{source.target} at {source.site}"
        raise StepError(reason=f"a result of {place} was expanded, and is not any more")
    if not alike:
        warnings.warn(RELAID.format(op=source.target, site=source.site), stacklevel=2)
    return _copied(tensor, nbytes, shape, stride, offset)


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
    return _owned(whole.as_strided(shape, stride, offset).copy_(tensor))


def _owned(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not take for a view: it may be written to."""
    return view.detach()


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
