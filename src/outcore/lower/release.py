"""Pass `release`: let a copy out run beside the ops that follow, and free its source later.

The device memory of an offloaded buffer is freed before the step where the copy should be done by
the profile's clock, or earlier where memory is needed: then the compute stream waits there (PoocH
section 4, "sync_swapout"). The positions are fixed here, so the peak never depends on how long a copy
really takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outcore.ir.hardware import Tier
from outcore.ir.plan import Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Copy, Free
from outcore.lower.draft import Draft, Step, occupancy


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A slot whose copy out is under way; `deadline` is the step the plan wants it gone by."""

    slot: int
    done_seconds: float
    deadline: int | None


def release(problem: Problem, plan: Plan, draft: Draft) -> Draft:
    """Move the frees of copied-out slots to where the copy is done. Linear in actions."""
    held = occupancy(problem, draft)
    deadlines = _deadlines(draft, plan)
    limit = problem.budget_bytes
    leaving: deque[_Leaving] = deque()
    extra = 0
    clock = out_free = 0.0
    steps: list[Step] = []

    def let_go(after: list[Action]) -> None:
        nonlocal extra
        gone = leaving.popleft()
        extra -= draft.slots[gone.slot].nbytes
        after.append(Free(gone.slot))

    for index, step in enumerate(draft.steps):
        if index == draft.boundary and steps:
            while leaving and held.between + extra > limit:
                clock = max(clock, leaving[0].done_seconds)
                let_go(steps[-1].after)
        before: list[Action] = []
        while leaving and _due(leaving[0], clock, index):
            clock = max(clock, leaving[0].done_seconds)
            let_go(before)
        while leaving and held.steps[index] + extra > limit:
            clock = max(clock, leaving[0].done_seconds)
            let_go(before)
        clock += problem.profile.seconds[step.run.op]
        after: list[Action] = []
        copied: set[int] = set()
        for action in step.after:
            if isinstance(action, Copy) and draft.slots[action.source].tier is Tier.DEVICE:
                slot = draft.slots[action.source]
                link = problem.hardware.link(Tier.DEVICE, draft.slots[action.target].tier)
                nbytes = problem.trace.buffers[slot.buffer].nbytes
                out_free = max(clock, out_free) + link.seconds(nbytes)
                leaving.append(_Leaving(slot.id, out_free, deadlines.get((slot.buffer, step.run.op))))
                copied.add(slot.id)
                extra += slot.nbytes
            elif isinstance(action, Free) and action.slot in copied:
                continue
            after.append(action)
        steps.append(Step(before + step.before, step.run, after))
    while leaving:
        let_go(steps[-1].after)
    return Draft(
        draft.slots, steps, draft.boundary, draft.arguments, draft.tangents, draft.results
    )


def _due(leaving: _Leaving, clock: float, step: int) -> bool:
    if leaving.deadline is None:
        return leaving.done_seconds <= clock
    return leaving.deadline <= step


def _deadlines(draft: Draft, plan: Plan) -> dict[tuple[int, int], int]:
    """(buffer, op after which it leaves) -> the step the plan wants its memory free by."""
    first = draft.first_step()
    return {
        (gap.buffer, gap.after): first[choice.release]
        for gap, choice in plan.choices
        if isinstance(choice, Offload) and choice.release is not None
    }


