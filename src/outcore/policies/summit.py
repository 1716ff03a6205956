"""summit: find where a plan holds the most when nothing overlaps, and what it holds there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.hardware import Tier
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Free
from outcore.lower.draft import Draft, occupancy

ARRIVAL = "what the caller passes in"
"""Names the start of the step in errors."""
PAUSE = "the pause between the forward and the backward call"
"""Names the pause in errors."""


@dataclass(frozen=True, slots=True)
class Summit:
    """The most device bytes of a draft, with everything counted, and when they are held."""

    nbytes: int
    step: int | None = None
    """The step that holds them; if `paused`, the first step of the backward call. None: the start,
    with what the caller passes in."""
    paused: bool = False
    """Whether it is the pause before `step`."""

    def op(self, draft: Draft) -> int | None:
        """The op that runs then; None if none does."""
        return None if self.step is None or self.paused else draft.steps[self.step].run.op

    def where(self, problem: Problem, draft: Draft) -> str:
        """The op with its place in the model, or the moment."""
        number = self.op(draft)
        if number is None:
            return PAUSE if self.paused else ARRIVAL
        op = problem.trace.ops[number]
        return f"op {op.id} {op.target}" + (f" at {op.site}" if op.site else "")


def summit(problem: Problem, draft: Draft) -> Summit:
    """The most that `draft` holds. If an op and the pause hold the same, it is the op."""
    held = occupancy(problem, draft)
    given = problem.outside_bytes + sum(draft.slots[s].nbytes for s in draft.arguments)
    found = Summit(given if held.steps else 0)
    if held.between > found.nbytes:
        found = Summit(held.between, draft.boundary, paused=True)
    highest = max(held.steps, default=-1)
    return Summit(highest, held.steps.index(highest)) if highest >= found.nbytes else found


def device_slots(draft: Draft, where: Summit) -> frozenset[int]:
    """The slots on the device at `where`; a result written over an argument is not there yet."""
    alive = set(draft.arguments)
    step = where.step
    if step is not None:
        for index in range(step):
            alive.update(draft.tangents if index == draft.boundary else ())
            _pass(alive, draft, index)
        alive.update(draft.tangents if step == draft.boundary else ())
        if not where.paused:
            _apply(alive, draft.steps[step].before)
    return frozenset(s for s in alive if draft.slots[s].tier is Tier.DEVICE)


def _pass(alive: set[int], draft: Draft, index: int) -> None:
    """Update `alive` from before a step to after it."""
    step = draft.steps[index]
    _apply(alive, step.before)
    for source, target in step.run.donate:
        alive.remove(source)
        alive.add(target)
    _apply(alive, step.after)


def _apply(alive: set[int], actions: Sequence[Action]) -> None:
    """Update `alive` with what `actions` allocate and free."""
    for action in actions:
        if isinstance(action, Alloc):
            alive.add(action.slot)
        elif isinstance(action, Free):
            alive.discard(action.slot)
