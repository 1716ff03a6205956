"""check: compare what an op returned with what the trace says about it.

A trace knows sizes and layouts from fake tensors, and sometimes a kernel does otherwise: batch norm
in bfloat16 saves its statistics in float32. A view replayed with wrong strides would be silently
wrong. So the first run is checked, and the graph is captured again if possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outcore.errors import CaptureError
from outcore.ir.trace import Trace, Value


@dataclass(kw_only=True, eq=False)
class MismatchError(CaptureError):
    """Results of `op` are not as captured; `real` lists those that differ."""

    op: int
    """The op's id in the trace."""
    real: tuple[tuple[int, Value, int], ...]
    """For each such result: its position, the Value that describes it, and the bytes of its
    storage."""


def checker(trace: Trace) -> Callable[[int, tuple[Any, ...], tuple[Any, ...]], None]:
    """Return a function for the `checked` instrument (`Instruments.checked`).

    It raises MismatchError at the first op whose results are laid out differently than captured,
    and CaptureError at the first op with a result that shares memory which it should not share.
    """

    def check(index: int, results: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        op = trace.ops[index]
        taken = {_address(a): "an argument" for a in arguments}
        reasons, real = [], []
        for position, (value, tensor) in enumerate(zip(op.outputs, results, strict=True)):
            if value is None or tensor is None:
                continue
            address = _address(tensor)
            if tensor.numel() and address in taken:
                reason = f"{op.target}: a result shares memory with {taken[address]}"
                raise CaptureError(reason=reason, site=op.site)
            taken[address] = "another result"
            fault = _fault(trace, trace.values[value], tensor)
            if fault:
                reasons.append(f"a result {fault}")
                nbytes = tensor.untyped_storage().nbytes()
                real.append((position, _as_it_is(trace.values[value], tensor), nbytes))
        if real:
            reason = f"{op.target}: {'; '.join(reasons)}"
            raise MismatchError(reason=reason, site=op.site, op=op.id, real=tuple(real))

    return check


def _as_it_is(value: Value, tensor: torch.Tensor) -> Value:
    """`value` with the dtype, shape, strides and so on that `tensor` really has."""
    return replace(
        value,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fault(trace: Trace, value: Value, tensor: torch.Tensor) -> str:
    """How `tensor` differs from what was captured; empty if it does not."""
    if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{value.dtype}", value.shape):
        return f"is {tensor.dtype} {tuple(tensor.shape)}, captured {value.dtype} {value.shape}"
    if tensor.numel() > 1 and tensor.stride() != value.stride:  # sizes of 1 matter, too
        return f"has strides {tensor.stride()}, captured {value.stride}"
    if (tensor.is_conj(), tensor.is_neg()) != (value.conj, value.neg):
        return f"is read conjugated ({tensor.is_conj()}) or negated ({tensor.is_neg()})"
    if tensor.storage_offset() != value.offset:
        return f"starts at {tensor.storage_offset()}, captured {value.offset}"
    size, planned_size = tensor.untyped_storage().nbytes(), trace.buffers[value.buffer].nbytes
    if size > planned_size:
        return f"has {size} B, captured {planned_size} B"
    return ""
