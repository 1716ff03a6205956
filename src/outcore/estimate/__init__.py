"""estimate: predict a Profile without a device, by the roofline of each op.

The time of an op is the longer of its arithmetic and its memory traffic, plus the time to launch
it. Both are at the fraction of the peak rate that ops of its class reach. The workspaces of default
algorithms are not estimated. Alternatives with a workspace have a separate model (`winograd`).
"""

from __future__ import annotations

from outcore.estimate.arithmetic import flops_of
from outcore.estimate.columns import columns_bytes
from outcore.estimate.roofline import TF32, TYPICAL, Efficiency, Roofline, roofline_seconds
from outcore.estimate.shapes import Shapes
from outcore.estimate.winograd import winograd
from outcore.ir.hardware import Hardware
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.trace import Trace

__all__ = ["TF32", "TYPICAL", "Efficiency", "columns", "estimate", "flops"]


def estimate(
    trace: Trace,
    hardware: Hardware,
    efficiency: Efficiency = TYPICAL,
    *,
    variants: bool = False,
) -> Profile:
    """Seconds of each op on `hardware`, as a Profile of source ESTIMATED. Linear in the ops.

    `variants` adds alternatives with a workspace for convolutions that a Winograd algorithm makes
    faster. Plans that use them can be simulated, but not executed.

    Raises OptionValueError if `hardware` has no arithmetic rate for a dtype that is used, or no
    memory rate.
    """
    shapes, machine = Shapes(trace), Roofline(hardware, efficiency)
    seconds = tuple(roofline_seconds(op, shapes, machine) for op in trace.ops)
    others: list[tuple[int, tuple[Cost, ...]]] = []
    for op in trace.ops if variants else ():
        cost = winograd(op, shapes, machine)
        if cost is not None and cost.seconds < seconds[op.id]:
            others.append((op.id, (cost,)))
    return Profile(seconds, (0,) * len(trace.ops), Source.ESTIMATED, tuple(others))


def flops(trace: Trace) -> tuple[float, ...]:
    """Floating-point operations of each op. A multiplication and an addition count as two.

    Only convolutions, matrix products and attention are counted; all other ops have 0.
    """
    shapes = Shapes(trace)
    return tuple(flops_of(op, shapes) for op in trace.ops)


def columns(trace: Trace) -> tuple[int, ...]:
    """Workspaces of convolutions that torch computes itself on a CPU; 0 for all other ops."""
    shapes = Shapes(trace)
    return tuple(columns_bytes(op, shapes) for op in trace.ops)
