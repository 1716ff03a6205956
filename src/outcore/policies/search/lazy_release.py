"""lazy_release: free device memory later after a copy out, while nothing else needs the memory.

Lowering frees device memory where the copy out should be done (`lower/release.py`). On the
simulated timeline nothing is faster. But a copy that takes longer than predicted then stalls
compute, even if nothing needs the memory yet. If memory is needed, lowering frees it in time
whatever the hint says (decision 0026).
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
from outcore.policies.search.judge import judge
from outcore.policies.search.just_in_time import COPY_SLACK
from outcore.policies.settle import check_program
from outcore.simulate import simulate

MARGIN = 0.005
"""Memory is freed this fraction of the step's time after a copy out that takes `COPY_SLACK` times
its predicted time would be done."""

MOST_TRIES = 64
"""The most evaluations used to find out which frees may come later."""


def lazy_release(evaluator: Evaluator, plan: Plan) -> Plan:
    """`plan` with memory freed so late that each copy out has enough time.

    Memory is freed no later than the next copy back, which may need it. If later frees make the
    step slower, they stay where they are; so do offloads with a `depart` or `release` hint. Lowers
    the plan once. Raises InfeasibleError if it does not fit.
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
    """Each gap whose memory is freed too early, with its offload and a later `release`."""
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
    """Each copy out of the device: its position, its source slot, and when it is surely done."""
    ahead = MARGIN * timeline.seconds
    for position, instruction in enumerate(program.body):
        action, span = instruction.action, timeline.spans[position]
        if instruction.stream is not Stream.OUT or not isinstance(action, Copy):
            continue
        if program.slots[action.source].tier is Tier.DEVICE:
            longer = COPY_SLACK * (span.stop_seconds - span.start_seconds)
            yield position, action.source, span.start_seconds + longer + ahead
