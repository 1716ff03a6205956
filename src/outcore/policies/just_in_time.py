"""just_in_time: bring back later what comes back before its time.

Lowering fetches as early as memory allows (`lower/prefetch.py`). On the simulated timeline nothing
is faster, but memory is held for nothing: what else lives has less room, and lies in pieces, so
that an allocator gives pages back and takes others all through the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from outcore.evaluate import Evaluator
from outcore.ir.plan import Gap, Offload, Plan, make_plan
from outcore.ir.program import Copy, Program, Run, Stream
from outcore.ir.timeline import Timeline
from outcore.lower import lower
from outcore.policies.judge import judge
from outcore.policies.settle import check_program
from outcore.simulate import simulate

AHEAD = 0.02
"""A copy back is done this part of the step before something waits for it,"""

LONGER = 1.5
"""even if it takes so many times as long as predicted, and those that come after it too."""


def just_in_time(evaluator: Evaluator, plan: Plan) -> Plan:
    """`plan` with each copy back as late as leaves it time enough.

    The plan itself where that would be slower, or take more of an outer tier than there is. Copies
    that are to arrive by a hint stay as they are. Lowers the plan once. Raises InfeasibleError
    where it does not fit.
    """
    program = lower(evaluator.problem, plan, fast=True)
    check_program(evaluator.problem, plan, program, plan.policy)
    timeline = simulate(evaluator.problem, program)
    later = _later(plan, program, timeline)
    found = replace(plan, choices=make_plan(plan.by_gap | later).choices)
    judged = judge(evaluator, found)
    return found if judged.fits and judged.seconds <= timeline.seconds else plan


def _later(plan: Plan, program: Program, timeline: Timeline) -> dict[Gap, Offload]:
    """The gaps that something comes back in too early, each with the last op that will do."""
    runs = [(i, x.action) for i, x in enumerate(program.body) if isinstance(x.action, Run)]
    own = [position for position, run in runs if not run.again]
    ready = [0.0, *(timeline.spans[position].stop_seconds for position in own[:-1])]
    read = {slot: position for position, run in reversed(runs) for slot in run.reads}
    offloads: dict[int, list[tuple[Gap, Offload]]] = {}
    for gap, choice in plan.choices:
        if isinstance(choice, Offload) and choice.arrive is None:
            offloads.setdefault(gap.buffer, []).append((gap, choice))
    later: dict[Gap, Offload] = {}
    for position, slot, seconds in _latest(program, timeline):
        now = bisect_left(own, position)
        reader = bisect_left(own, read.get(slot, position))
        for gap, choice in offloads.get(program.slots[slot].buffer, ()):
            op = min(bisect_right(ready, seconds) - 1, gap.before)
            hints = (choice.depart or 0, choice.prefetch or 0)
            if gap.after < reader <= gap.before and op > max(now, gap.after, *hints):
                later[gap] = replace(choice, prefetch=op)
    return later


def _latest(program: Program, timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """Each copy back: its position, the slot it fills, and when it has to begin at the latest.

    What is in the way of a copy out has to be gone by then.
    """
    ahead = AHEAD * timeline.seconds
    needed: dict[int, float] = {}
    latest = leaves = inf
    for position in range(len(program.body) - 1, -1, -1):
        instruction, span = program.body[position], timeline.spans[position]
        action, start = instruction.action, span.start_seconds
        if instruction.stream is Stream.IN:
            longer = LONGER * (span.stop_seconds - start)
            latest = min(latest, needed.get(position, inf) - ahead) - longer
            if isinstance(action, Copy):
                yield position, action.target, latest
            continue
        if instruction.stream is Stream.OUT:  # only its copies take time
            start = leaves = start if isinstance(action, Copy) else leaves
        for other in (*instruction.after, *instruction.pace):
            needed[other] = min(start, needed.get(other, inf))
