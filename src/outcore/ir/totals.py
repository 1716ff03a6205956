"""totals: sums over a step or a program: bytes held, bytes offloaded, seconds recomputed."""

from __future__ import annotations

from outcore.ir.once import once_per_trace
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program, Run, Stream
from outcore.ir.trace import Trace


def resident_bytes(problem: Problem) -> int:
    """Device bytes held for the whole step: external memory, and what the caller owns."""
    return problem.outside_bytes + borrowed_bytes(problem.trace)


@once_per_trace
def borrowed_bytes(trace: Trace) -> int:
    """Device bytes of what the caller owns."""
    return sum(b.nbytes for b in trace.buffers if b.borrowed)


def offloaded_bytes(trace: Trace, program: Program) -> int:
    """Bytes that the program copies out of the device."""
    return sum(
        trace.buffers[program.slots[x.action.source].buffer].nbytes
        for x in program.body
        if isinstance(x.action, Copy) and x.stream is Stream.OUT
    )


def recompute_seconds(problem: Problem, program: Program) -> float:
    """Seconds of all reruns in the program."""
    cost = problem.profile.cost
    runs = (x.action for x in program.body if isinstance(x.action, Run))
    return sum((cost(run.op, run.variant).seconds for run in runs if run.again), 0.0)
