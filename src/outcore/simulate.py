"""simulate: predict the Timeline of a Program on a machine that is only described.

There are three serial resources (compute, copies out, copies back), each in issue order. An
instruction starts when its stream is free and everything it waits for (`after` and `pace`) is done.
Allocs and frees need no time; memory is static (`ir/memory.py`). A copy takes as long whatever the
other streams do, also on a machine that is not `duplex`.
"""

from __future__ import annotations

from outcore.ir.hardware import Tier
from outcore.ir.memory import tier_bytes
from outcore.ir.problem import Problem
from outcore.ir.profile import Source
from outcore.ir.program import Action, Copy, Free, Instruction, Program, Run, Stream
from outcore.ir.timeline import Cause, Span, Stall, Timeline


def simulate(problem: Problem, program: Program) -> Timeline:
    """Return the predicted Timeline of `program`. Linear in the number of instructions."""
    free = dict.fromkeys(Stream, 0.0)
    done: list[float] = []
    spans: list[Span] = []
    stalls: list[Stall] = []
    for position, instruction in enumerate(program.body):
        stream, ready = instruction.stream, free[instruction.stream]
        start = max([ready, *(done[i] for i in (*instruction.after, *instruction.pace))])
        if stream is Stream.COMPUTE and start > ready:
            stalls.append(Stall(position, _cause(program, instruction, done), start - ready))
        stop = start + _seconds(problem, program, instruction.action)
        spans.append(Span(position, stream, start, stop))
        free[stream] = stop
        done.append(stop)
    peaks = tuple((tier, tier_bytes(problem, program, tier)) for tier in Tier)
    return Timeline(tuple(spans), tuple(stalls), peaks, Source.SIMULATED)


def _seconds(problem: Problem, program: Program, action: Action) -> float:
    """Return how long an action takes."""
    if isinstance(action, Run):
        return problem.profile.cost(action.op, action.variant).seconds
    if isinstance(action, Copy):
        source, target = program.slots[action.source], program.slots[action.target]
        link = problem.hardware.link(source.tier, target.tier)
        return link.seconds(problem.trace.buffers[source.buffer].nbytes)
    return 0.0


def _cause(program: Program, instruction: Instruction, done: list[float]) -> Cause:
    """Return what the compute stream waited for longest."""
    last = max((*instruction.after, *instruction.pace), key=done.__getitem__)
    if last not in instruction.after:
        return Cause.PACE
    is_free = isinstance(instruction.action, Free)
    return Cause.RELEASE if is_free or program.body[last].stream is Stream.OUT else Cause.FETCH
