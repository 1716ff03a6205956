"""check: what an op returned against what the trace says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outcore.errors import CaptureError
from outcore.ir.trace import Trace, Value


def checker(trace: Trace) -> Callable[[int, tuple[Any, ...], tuple[Any, ...]], None]:
    """A function for `Instruments.checked`: raises CaptureError at the first difference.

    Views are replayed from sizes and strides that fake tensors gave; a kernel that returns another
    layout, or shares memory it should not, would make them wrong without a sound.
    """

    def check(index: int, results: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        op = trace.ops[index]
        taken = {_address(a): "an argument" for a in arguments}
        for value, tensor in zip(op.outputs, results, strict=True):
            if value is None or tensor is None:
                continue
            fault = _fault(trace, trace.values[value], tensor)
            address = _address(tensor)
            if tensor.numel() and address in taken:
                fault = f"shares memory with {taken[address]}"
            taken[address] = "another result"
            if fault:
                raise CaptureError(reason=f"{op.target}: a result {fault}", site=op.site)

    return check


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
