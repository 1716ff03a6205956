"""estimate: a Profile without a device, by the roofline of each op.

An op takes as long as its arithmetic or its memory traffic, whichever is longer, at the part of the
peak rate that ops of its class reach, and the time to launch it. Workspaces of what ops run as by
default are not estimated; alternatives with one are a model of their own (`winograd`).
"""

from __future__ import annotations

from outcore.estimate.arithmetic import flops_of
from outcore.estimate.roofline import TF32, TYPICAL, Efficiency, Machine, roofline_seconds
from outcore.estimate.shapes import Shapes
from outcore.estimate.winograd import winograd
from outcore.ir.hardware import Hardware
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.trace import Trace

__all__ = ["TF32", "TYPICAL", "Efficiency", "estimate", "flops"]


def estimate(
    trace: Trace,
    hardware: Hardware,
    efficiency: Efficiency = TYPICAL,
    *,
    variants: bool = False,
) -> Profile:
    """Seconds of each op on `hardware`, as a Profile of source ESTIMATED. Linear in the ops.

    `variants` adds alternatives with a workspace to convolutions that a Winograd algorithm makes
    faster. Plans that use them can be simulated, and not executed.

    Raises OptionValueError where `hardware` has no rate of arithmetic for a type that is computed
    with, or none of its memory.
    """
    shapes, machine = Shapes(trace), Machine(hardware, efficiency)
    seconds = tuple(roofline_seconds(op, shapes, machine) for op in trace.ops)
    others: list[tuple[int, tuple[Cost, ...]]] = []
    for op in trace.ops if variants else ():
        cost = winograd(op, shapes, machine)
        if cost is not None and cost.seconds < seconds[op.id]:
            others.append((op.id, (cost,)))
    return Profile(seconds, (0,) * len(trace.ops), Source.ESTIMATED, tuple(others))


def flops(trace: Trace) -> tuple[float, ...]:
    """Floating-point operations of each op, a multiplication and an addition counted as two.

    Of convolutions, matrix products and attention; 0 for all others.
    """
    shapes = Shapes(trace)
    return tuple(flops_of(op, shapes) for op in trace.ops)
