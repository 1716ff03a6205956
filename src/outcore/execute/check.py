"""check: what an op returned against what the trace says of it.

A trace knows sizes and layouts from fake tensors, and a kernel now and then does otherwise (batch
norm in bfloat16 saves its statistics in float32). A view replayed from wrong strides would be wrong
without a sound, so the first run is checked, and the graph captured again where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outcore.errors import CaptureError
from outcore.ir.trace import Op, Trace, Value


@dataclass(kw_only=True, eq=False)
class MismatchError(CaptureError):
    """Result `position` of `op` is not as captured. `value` and `nbytes` are what it really is."""

    op: int
    position: int
    value: Value
    nbytes: int


def checker(trace: Trace) -> Callable[[int, tuple[Any, ...], tuple[Any, ...]], None]:
    """A function for `Instruments.checked`.

    It raises MismatchError at the first result that is laid out otherwise than captured, and
    CaptureError at one that shares memory it should not.
    """

    def check(index: int, results: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        op = trace.ops[index]
        taken = {_address(a): "an argument" for a in arguments}
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
                raise _mismatch(op, position, fault, trace.values[value], tensor)

    return check


def _mismatch(
    op: Op, position: int, fault: str, value: Value, tensor: torch.Tensor
) -> MismatchError:
    real = replace(
        value,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )
    return MismatchError(
        reason=f"{op.target}: a result {fault}",
        site=op.site,
        op=op.id,
        position=position,
        value=real,
        nbytes=tensor.untyped_storage().nbytes(),
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fault(trace: Trace, value: Value, tensor: torch.Tensor) -> str:
    """What is not as captured; empty where all is."""
    if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{value.dtype}", value.shape):
        return f"is {tensor.dtype} {tuple(tensor.shape)}, captured {value.dtype} {value.shape}"
    strides = [
        (real, planned)
        for n, real, planned in zip(tensor.shape, tensor.stride(), value.stride, strict=True)
        if n > 1
    ]
    if tensor.numel() and any(real != planned for real, planned in strides):
        return f"has strides {tensor.stride()}, captured {value.stride}"
    if tensor.storage_offset() != value.offset:
        return f"starts at {tensor.storage_offset()}, captured {value.offset}"
    size, planned_size = tensor.untyped_storage().nbytes(), trace.buffers[value.buffer].nbytes
    if size > planned_size:
        return f"takes {size} B, captured {planned_size} B"
    return ""
