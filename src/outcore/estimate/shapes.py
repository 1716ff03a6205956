"""Shapes: the shapes and bytes of what an op reads and makes; and op names."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

from outcore.ir.trace import Arg, Op, Ref, Trace, Value, refs
from outcore.ir.verify import ITEM_BYTES

Shape: TypeAlias = tuple[int, ...]

INPUT_GRADIENT = "outcore.convolution_input_gradient.default"
"""The gradient of a convolution for its input alone (`capture.rewrites.convolution`)."""

CROSS_ENTROPY = "outcore.cross_entropy_backward.default"
"""The gradient of cross-entropy, some rows at a time (`capture.rewrites.cross_entropy`)."""


class Shapes:
    """Shapes and bytes of the arguments and results of a trace's ops."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def value(self, arg: Arg) -> Value:
        """The Value that an argument refers to. Raises TypeError if it is not one."""
        if not isinstance(arg, Ref):
            raise TypeError(f"{arg!r} is no value")
        return self.trace.values[arg.value]

    def shape(self, arg: Arg) -> Shape:
        """The shape of the Value that an argument refers to."""
        return self.value(arg).shape

    def outputs(self, op: Op) -> list[Value | None]:
        """The results of `op`; None for one that is not returned."""
        return [None if i is None else self.trace.values[i] for i in op.outputs]

    def nbytes(self, value: Value) -> int:
        """Bytes that are touched. An expanded view touches no more than its buffer has."""
        touched = prod(value.shape) * ITEM_BYTES[value.dtype]
        return min(touched, self.trace.buffers[value.buffer].nbytes)

    def read(self, op: Op) -> list[Value]:
        """The Values that `op` reads, each once."""
        found = dict.fromkeys(ref.value for ref in refs(op.arguments))
        return [self.trace.values[i] for i in found]


def name_of(target: str) -> str:
    """The short name of a known op: `aten.mm.default` -> `mm`; empty for others."""
    parts = target.split(".")
    known = parts[0] == "aten" or target == INPUT_GRADIENT
    return parts[1] if known and len(parts) > 1 else ""
