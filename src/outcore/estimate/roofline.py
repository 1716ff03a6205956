"""roofline: the time of one op: its arithmetic or its memory traffic, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.errors import OptionValueError
from outcore.estimate.arithmetic import flops_of
from outcore.estimate.shapes import CROSS_ENTROPY, Shapes, name_of
from outcore.ir.hardware import Hardware
from outcore.ir.trace import Op


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The fraction of the device's peak rate (arithmetic or memory) that a class of ops reaches."""

    convolution: float = 0.6
    matmul: float = 0.75
    attention: float = 0.5
    memory: float = 0.8


TYPICAL = Efficiency()

TF32 = "tfloat32"
"""The dtype in which torch may compute float32 convolutions, if the device has it."""

IN_RATES_OF = {
    "complex64": "float32",
    "complex128": "float64",
    "int32": "float32",
    "int64": "float32",
}
"""Dtypes that a machine without a rate for them computes at the rate of another one. A complex
product is four real ones. For integers this is a guess."""

EXTRA_PASSES = {
    "batch_norm": (1, 2),
    "layer_norm": (1, 2),
    "group_norm": (1, 2),
    "softmax": (1, 0),
}
"""Part of a target's name -> how many more times than once its forward op reads its first argument,
and how many more times its backward op does."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device, and the fraction of its peak rates that ops reach."""

    hardware: Hardware
    efficiency: Efficiency

    def memory_rate(self) -> float:
        """Bytes per second. Raises OptionValueError if the hardware gives no rate."""
        rate = self.hardware.memory_bytes_per_second * self.efficiency.memory
        if rate <= 0:
            raise OptionValueError(
                option="hardware", value=self.hardware.name, reason="it has no memory bandwidth"
            )
        return rate

    def compute_rate(self, op: Op, shapes: Shapes) -> float:
        """Floating-point operations per second of an op that returns something.

        Raises OptionValueError if the hardware gives no rate for the dtype of its result.
        """
        dtype = next(value.dtype for value in shapes.outputs(op) if value is not None)
        rates = dict(self.hardware.flops_per_second)
        real_products = 1
        if dtype not in rates and dtype in IN_RATES_OF:
            real_products = 4 if dtype.startswith("complex") else 1
            dtype = IN_RATES_OF[dtype]
        if dtype == "float32" and "convolution" in op.target and TF32 in rates:
            dtype = TF32
        if dtype not in rates:
            raise OptionValueError(
                option="hardware",
                value=self.hardware.name,
                reason=f"it has no compute rate for {dtype}, which the step computes in; it has "
                f"rates for {', '.join(rates) or 'no dtype'}: name another machine",
            )
        return rates[dtype] / real_products * _class_efficiency(op.target, self.efficiency)


def roofline_seconds(op: Op, shapes: Shapes, machine: Roofline) -> float:
    """Seconds of `op`, with its launch. Raises OptionValueError as `Roofline` does."""
    moved = _traffic(op, shapes) / machine.memory_rate()
    count = flops_of(op, shapes)
    computed = count / machine.compute_rate(op, shapes) if count else 0.0
    return max(computed, moved) + machine.hardware.op_overhead_seconds


def _traffic(op: Op, shapes: Shapes) -> float:
    """Bytes read and written, including the further passes over its data that a kernel needs."""
    read = shapes.read(op)
    written = [value for value in shapes.outputs(op) if value is not None]
    if name_of(op.target) == "embedding":  # reads as many rows of the table as it writes
        read = [*read[1:], *written]
    nbytes = sum(map(shapes.nbytes, (*read, *written)))
    if op.target == CROSS_ENTROPY:  # log-softmax's gradient is written and read, block by block
        nbytes += 2 * sum(map(shapes.nbytes, written))
    backward = "backward" in op.target
    for name, passes in EXTRA_PASSES.items():
        if name in op.target and read:
            nbytes += passes[backward] * shapes.nbytes(read[0])
    return nbytes


def _class_efficiency(target: str, efficiency: Efficiency) -> float:
    name = name_of(target)
    if "convolution" in name:
        return efficiency.convolution
    return efficiency.attention if "scaled_dot_product" in name else efficiency.matmul
