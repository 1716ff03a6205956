"""estimate: a Profile without a device, by the roofline of each op.

An op takes as long as its arithmetic or its memory traffic, whichever is longer, at the part of the
peak rate that ops of its class reach, and the time to launch it. Workspaces are not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from outcore.errors import OptionValueError, did_you_mean
from outcore.ir.hardware import Hardware
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Arg, Op, Ref, Trace, Value, refs
from outcore.ir.verify import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The part of the device's peak that ops of a class reach, of its arithmetic or its memory."""

    convolution: float = 0.6
    matmul: float = 0.75
    attention: float = 0.5
    memory: float = 0.8


TYPICAL = Efficiency()

TF32 = "tfloat32"
"""The type that torch lets convolutions of float32 compute in, where a device has it."""

EXTRA_PASSES = {
    "batch_norm": (1, 2),
    "layer_norm": (1, 2),
    "group_norm": (1, 2),
    "softmax": (1, 0),
}
"""Part of a target's name -> how often its forward op reads its first argument once more than any
op must, and how often its backward op does."""

Shape = tuple[int, ...]
Flops = Callable[[Op, "_Shapes"], float]


def estimate(trace: Trace, hardware: Hardware, efficiency: Efficiency = TYPICAL) -> Profile:
    """Seconds of each op on `hardware`, as a Profile of source ESTIMATED. Linear in the ops.

    Raises OptionValueError where `hardware` has no rate of arithmetic for a type that is computed
    with, or none of its memory.
    """
    shapes = _Shapes(trace)
    seconds = tuple(_seconds(op, shapes, hardware, efficiency) for op in trace.ops)
    return Profile(seconds, (0,) * len(trace.ops), Source.ESTIMATED)


def flops(trace: Trace) -> tuple[float, ...]:
    """Floating-point operations of each op, a multiplication and an addition counted as two.

    Of convolutions, matrix products and attention; 0 for all others.
    """
    shapes = _Shapes(trace)
    return tuple(_flops(op, shapes) for op in trace.ops)


class _Shapes:
    """Shapes and bytes of the arguments and results of a trace's ops."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def value(self, arg: Arg) -> Value:
        """The Value that an argument is. TypeError: it is none."""
        if not isinstance(arg, Ref):
            raise TypeError(f"{arg!r} is no value")
        return self.trace.values[arg.value]

    def shape(self, arg: Arg) -> Shape:
        """The shape of the Value that an argument is."""
        return self.value(arg).shape

    def outputs(self, op: Op) -> list[Value | None]:
        """Results, None where there is none."""
        return [None if i is None else self.trace.values[i] for i in op.outputs]

    def nbytes(self, value: Value) -> int:
        """Bytes that are touched: an expanded view touches no more than its buffer has."""
        touched = prod(value.shape) * ITEM_BYTES[value.dtype]
        return min(touched, self.trace.buffers[value.buffer].nbytes)

    def read(self, op: Op) -> list[Value]:
        """Values that `op` reads, each once."""
        found = dict.fromkeys(ref.value for ref in refs(op.arguments))
        return [self.trace.values[i] for i in found]


def _seconds(op: Op, shapes: _Shapes, hardware: Hardware, efficiency: Efficiency) -> float:
    rate = hardware.memory_bytes_per_second * efficiency.memory
    if rate <= 0:
        raise OptionValueError(
            option="hardware", value=hardware.name, reason="it has no rate of its memory"
        )
    moved = _traffic(op, shapes) / rate
    count = _flops(op, shapes)
    if not count:
        return moved + hardware.op_overhead_seconds
    dtype = next(value.dtype for value in shapes.outputs(op) if value is not None)
    if (
        dtype == "float32"
        and "convolution" in op.target
        and TF32 in dict(hardware.flops_per_second)
    ):
        dtype = TF32
    computed = count / (_peak(hardware, dtype) * _class_efficiency(op.target, efficiency))
    return max(computed, moved) + hardware.op_overhead_seconds


def _peak(hardware: Hardware, dtype: str) -> float:
    rates = dict(hardware.flops_per_second)
    if dtype not in rates:
        raise OptionValueError(
            option="hardware",
            value=hardware.name,
            reason=f"it has no rate of arithmetic for {dtype}: {did_you_mean(dtype, rates)}",
        )
    return rates[dtype]


def _traffic(op: Op, shapes: _Shapes) -> float:
    """Bytes read and written, with the passes that a kernel needs beyond one."""
    read = shapes.read(op)
    written = [value for value in shapes.outputs(op) if value is not None]
    if _name(op.target) == "embedding":  # reads as many rows of the table as it writes
        read = [*read[1:], *written]
    nbytes = sum(map(shapes.nbytes, (*read, *written)))
    backward = "backward" in op.target
    for name, passes in EXTRA_PASSES.items():
        if name in op.target and read:
            nbytes += passes[backward] * shapes.nbytes(read[0])
    return nbytes


def _flops(op: Op, shapes: _Shapes) -> float:
    name = _name(op.target)
    if "scaled_dot_product" in name:
        return _attention(op, shapes)
    formula = _FORMULAS.get(name)
    return 0.0 if formula is None else formula(op, shapes)


def _class_efficiency(target: str, efficiency: Efficiency) -> float:
    name = _name(target)
    if "convolution" in name:
        return efficiency.convolution
    return efficiency.attention if "scaled_dot_product" in name else efficiency.matmul


def _name(target: str) -> str:
    """The name of an op of torch's own: `aten.mm.default` -> `mm`; empty for others."""
    parts = target.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else ""


def _convolution(op: Op, shapes: _Shapes) -> float:
    source, weight = op.args[0], op.args[1]
    (result,) = (value for value in shapes.outputs(op) if value is not None)
    return _convolution_flops(shapes.shape(source), shapes.shape(weight), result.shape, op.args[6])


def _convolution_backward(op: Op, shapes: _Shapes) -> float:
    gradient, source, weight = (shapes.shape(arg) for arg in op.args[:3])
    once = _convolution_flops(source, weight, gradient, op.args[7])
    return once * sum(value is not None for value in shapes.outputs(op)[:2])


def _convolution_flops(source: Shape, weight: Shape, result: Shape, transposed: Arg) -> float:
    """Each element of the smaller side's map meets each weight of one channel of the other side."""
    spread = source if transposed else result
    return 2.0 * prod(spread) * prod(weight[1:])


def _mm(op: Op, shapes: _Shapes) -> float:
    return _product(shapes.shape(op.args[0]), shapes.shape(op.args[1]))


def _addmm(op: Op, shapes: _Shapes) -> float:
    return _product(shapes.shape(op.args[1]), shapes.shape(op.args[2]))


def _product(one: Sequence[int], other: Sequence[int]) -> float:
    return 2.0 * prod(one) * other[-1]


def _attention(op: Op, shapes: _Shapes) -> float:
    """Two products of (..., s, d) with (..., t, d); backward makes five, one of them again."""
    backward = "backward" in op.target
    query, key = (shapes.shape(arg) for arg in op.args[backward : backward + 2])
    products = 5 if backward else 2
    return products * 2.0 * prod(query) * key[-2]


_FORMULAS: dict[str, Flops] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
}
