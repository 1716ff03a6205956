"""Pass `prefetch`: issue copies back early enough to hide them.

Copies back stay in order of first use, with or without hints. Each is issued before the earliest
step from which memory is free for it until its use (PoocH section 4: as early as free memory
allows), or at the plan's hint `prefetch`. If memory does not allow the hint, it is issued as soon
after it as memory allows. If the plan wants a copy done before it is needed (`arrive`), compute
waits for it there, unless the copy can only be issued later. A slot that a backward op overwrites
with its result is fetched in the backward call, because nothing that crosses the boundary may be
overwritten (`donate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outcore.ir.hardware import Tier
from outcore.ir.plan import Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Copy, Free
from outcore.lower.draft import Draft, Step, occupancy


def prefetch(problem: Problem, plan: Plan, draft: Draft) -> Draft:
    """Move each copy back, with its alloc, to an earlier step, within the device budget."""
    held = occupancy(problem, draft)
    steps = np.array(held.steps, dtype=np.int64)
    room_between = problem.budget_bytes - held.between
    hints = _hints(draft, plan)
    taken = {source for step in draft.steps for source, _ in step.run.donate}
    moved: list[list[Action]] = [[] for _ in draft.steps]
    awaits: list[list[int]] = [[] for _ in draft.steps]
    left: list[list[Action]] = []
    earliest = 0
    ready: dict[int, int] = {}
    for index, step in enumerate(draft.steps):
        stay, groups = _split(draft, step.before)
        left.append(stay)
        for group, source, target in groups:
            nbytes = draft.slots[target].nbytes
            hint = _hint(hints.get(draft.slots[target].buffer, ()), index)
            low = max(earliest, ready.get(source, 0), hint.issue)
            if low < draft.boundary <= index and (target in taken or nbytes > room_between):
                low = draft.boundary
            full = np.flatnonzero(steps[low:index] + nbytes > problem.budget_bytes)
            at = low + int(full[-1]) + 1 if len(full) else min(low, index)
            steps[at:index] += nbytes
            if at < draft.boundary <= index:
                room_between -= nbytes
            moved[at] += group
            if at <= hint.arrive < index:
                awaits[hint.arrive].append(target)
            earliest = at
        for action in (*step.before, *step.after):
            if isinstance(action, Copy):
                ready[action.target] = index + 1
    new = [
        Step(_order(draft, stay, copies), step.run, step.after, awaited)
        for stay, copies, awaited, step in zip(left, moved, awaits, draft.steps, strict=True)
    ]
    return replace(draft, steps=new)


def _split(
    draft: Draft, before: list[Action]
) -> tuple[list[Action], list[tuple[list[Action], int, int]]]:
    """Separate the copies back (alloc, copy, free of the outer slot) from the other actions."""
    moves = (a for a in before if isinstance(a, Copy))
    copies = {a.target: a for a in moves if draft.slots[a.target].tier is Tier.DEVICE}
    groups: dict[int, list[Action]] = {target: [] for target in copies}
    owner: dict[int | None, int] = {copy.source: copy.target for copy in copies.values()}
    owner.update((target, target) for target in copies)
    stay: list[Action] = []
    for action in before:
        target = owner.get(_slot_of(action))
        (stay if target is None else groups[target]).append(action)
    return stay, [(group, copies[t].source, t) for t, group in groups.items()]


def _slot_of(action: Action) -> int | None:
    """The slot that an action allocates, frees or fills; None for a run."""
    if isinstance(action, Copy):
        return action.target
    return action.slot if isinstance(action, Alloc | Free) else None


def _order(draft: Draft, stay: list[Action], copies: list[Action]) -> list[Action]:
    """Frees first, then copies back, then the rest (allocs of the step's own outputs)."""
    frees: list[Action] = []
    others: list[Action] = []
    for action in stay:
        free = isinstance(action, Free) and draft.slots[action.slot].tier is Tier.DEVICE
        (frees if free else others).append(action)
    return [*frees, *copies, *others]


@dataclass(frozen=True, slots=True)
class _Hint:
    """What the plan wants for the copy back in one gap, in step numbers.

    The gap is after step `start`, up to step `stop`. The copy is issued before step `issue`, and
    compute waits for it before step `arrive`.
    """

    start: int
    stop: int
    issue: int
    arrive: int


_NO_HINT = _Hint(0, 0, issue=0, arrive=-1)


def _hints(draft: Draft, plan: Plan) -> dict[int, list[_Hint]]:
    """The hints for each buffer, ascending."""
    own, first = draft.first_step(), draft.first_step_for()
    hints: dict[int, list[_Hint]] = {}
    for gap, choice in plan.choices:
        if isinstance(choice, Offload):
            hint = _Hint(
                own[gap.after],
                own[gap.before],
                _NO_HINT.issue if choice.prefetch is None else first[choice.prefetch],
                _NO_HINT.arrive if choice.arrive is None else first[choice.arrive],
            )
            hints.setdefault(gap.buffer, []).append(hint)
    return hints


def _hint(hints: Sequence[_Hint], step: int) -> _Hint:
    """The hint of the gap that contains `step`."""
    return next((hint for hint in hints if hint.start < step <= hint.stop), _NO_HINT)
