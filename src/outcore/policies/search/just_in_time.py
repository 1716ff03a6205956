"""just_in_time: delay copies back that would be done long before they are needed.

Lowering prefetches as early as memory allows (`lower/prefetch.py`). On the simulated timeline
nothing is faster, but it holds memory without need. Other live tensors then have less room and are
fragmented, so an allocator gives pages back and maps others all through the step (decision 0017).
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
from outcore.policies.search.judge import judge
from outcore.policies.settle import check_program
from outcore.simulate import simulate

MARGIN = 0.02
"""A copy back is to be done this fraction of the step's time before something waits for it."""

COPY_SLACK = 1.5
"""That still holds if the copy, and those that come after it, take this many times their predicted
time."""


def just_in_time(evaluator: Evaluator, plan: Plan) -> Plan:
    """`plan` with each copy back issued as late as leaves it enough time.

    Returns `plan` itself if the new plan would be slower, or would not fit in the outer tier.
    Copies with an `arrive` hint stay as they are. Lowers the plan once. Raises InfeasibleError if
    `plan` does not fit.
    """
    program = lower(evaluator.problem, plan, fast=True)
    check_program(evaluator.problem, plan, program, plan.policy)
    timeline = simulate(evaluator.problem, program)
    later = _later(plan, program, timeline)
    found = replace(plan, choices=make_plan(plan.by_gap | later).choices)
    judged = judge(evaluator, found)
    return found if judged.fits and judged.seconds <= timeline.seconds else plan


def _later(plan: Plan, program: Program, timeline: Timeline) -> dict[Gap, Offload]:
    """Gap -> its offload with a later `prefetch`, for the gaps whose copies back are too early.

    The new `prefetch` is the last op that leaves the copy enough time.
    """
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
    """Each copy back: its position, the slot it fills, and the latest time at which it must begin.

    A free on the same stream can make room for a copy out. It must be done before that copy starts.
    """
    ahead = MARGIN * timeline.seconds
    needed: dict[int, float] = {}
    latest = leaves = inf
    for position in range(len(program.body) - 1, -1, -1):
        instruction, span = program.body[position], timeline.spans[position]
        action, start = instruction.action, span.start_seconds
        if instruction.stream is Stream.IN:
            longer = COPY_SLACK * (span.stop_seconds - start)
            latest = min(latest, needed.get(position, inf) - ahead) - longer
            if isinstance(action, Copy):
                yield position, action.target, latest
            continue
        if instruction.stream is Stream.OUT:  # an alloc counts when the copy after it starts
            start = leaves = start if isinstance(action, Copy) else leaves
        for other in (*instruction.after, *instruction.pace):
            needed[other] = min(start, needed.get(other, inf))
