"""lazy_release: let what leaves hold its memory for longer, while nothing else wants it.

Lowering frees device memory where the copy out should be done (`lower/release.py`). On the
simulated timeline nothing is faster, but a copy that takes longer than predicted then stops
compute, though nobody wants the memory yet. Memory that is wanted is free in time whatever the
hint says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from outcore.evaluate import Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.plan import Gap, Offload, Plan, make_plan
from outcore.ir.program import Copy, Free, Program, Run, Stream
from outcore.ir.timeline import Timeline
from outcore.lower import lower
from outcore.policies.judge import judge
from outcore.policies.just_in_time import LONGER
from outcore.policies.settle import check_program
from outcore.simulate import simulate

AHEAD = 0.005
"""Memory is free this part of the step after a copy out that takes `LONGER` would be done."""

MOST_TRIES = 64
"""Evaluations, at most, to tell which frees may come later."""


def lazy_release(evaluator: Evaluator, plan: Plan) -> Plan:
    """`plan` with the memory of what leaves free as late as leaves its copy out time enough.

    But no later than the next copy back, which may want it. Frees that would make the step slower
    so stay where they are, as does what leaves or is free by a hint. Lowers the plan once. Raises
    InfeasibleError where it does not fit.
    """
    program = lower(evaluator.problem, plan, fast=True)
    check_program(evaluator.problem, plan, program, plan.policy)
    timeline = simulate(evaluator.problem, program)
    parts = deque([list(_later(plan, program, timeline))])
    for _ in range(MOST_TRIES):
        if not parts:
            break
        part = parts.popleft()
        found = replace(plan, choices=make_plan(plan.by_gap | dict(part)).choices)
        judged = judge(evaluator, found)
        if judged.fits and judged.seconds <= timeline.seconds:
            plan = found
        elif len(part) > 1:
            middle = len(part) // 2
            parts += part[:middle], part[middle:]
    return plan


def _later(plan: Plan, program: Program, timeline: Timeline) -> Iterator[tuple[Gap, Offload]]:
    """The gaps whose memory is free too early, each with the op before which that will do."""
    body = list(enumerate(program.body))
    own = [i for i, x in body if isinstance(x.action, Run) and not x.action.again]
    starts = [timeline.spans[position].start_seconds for position in own]
    backs = [i for i, x in body if x.stream is Stream.IN and isinstance(x.action, Copy)]
    freed = {x.action.slot: i for i, x in body if isinstance(x.action, Free)}
    offloads: dict[int, list[tuple[Gap, Offload]]] = {}
    for gap, choice in plan.choices:
        if isinstance(choice, Offload) and choice.depart is None and choice.release is None:
            offloads.setdefault(gap.buffer, []).append((gap, choice))
    for position, slot, seconds in _gone(program, timeline):
        if slot not in freed:
            continue
        leaves, now = bisect_left(own, position), bisect_left(own, freed[slot])
        back = bisect_left(backs, freed[slot])
        room = bisect_left(own, backs[back]) - 1 if back < len(backs) else len(own) - 1
        op = min(bisect_left(starts, seconds), room)
        for gap, choice in offloads.get(program.slots[slot].buffer, ()):
            last = gap.before if choice.prefetch is None else choice.prefetch
            if gap.after < leaves <= gap.before and now < min(op, last):
                yield gap, replace(choice, release=min(op, last))


def _gone(program: Program, timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """Each copy that leaves the device: its position, its slot, and when it is surely done."""
    ahead = AHEAD * timeline.seconds
    for position, instruction in enumerate(program.body):
        action, span = instruction.action, timeline.spans[position]
        if instruction.stream is not Stream.OUT or not isinstance(action, Copy):
            continue
        if program.slots[action.source].tier is Tier.DEVICE:
            longer = LONGER * (span.stop_seconds - span.start_seconds)
            yield position, action.source, span.start_seconds + longer + ahead
