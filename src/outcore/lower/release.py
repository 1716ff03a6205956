"""Pass `release`: let a copy out run beside the ops that follow, and free its source later.

The device memory of an offloaded buffer is freed before the step where the copy should be done by
the profile's clock, or where the plan's hint says; earlier where memory is needed: then the compute
stream waits there (PoocH section 4, "sync_swapout"). The positions are fixed here, so the peak
never depends on how long a copy really takes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace

from outcore.ir.hardware import Tier
from outcore.ir.plan import Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Copy, Free
from outcore.lower.draft import Draft, Step, occupancy


def release(problem: Problem, plan: Plan, draft: Draft) -> Draft:
    """Move the frees of copied-out slots to where the copy is done. Linear in actions."""
    return _Release(problem, plan, draft).run()


class _Release:
    """A clock of the compute stream, and the slots whose copies out are under way."""

    def __init__(self, problem: Problem, plan: Plan, draft: Draft) -> None:
        self.problem, self.draft = problem, draft
        self.deadlines = _deadlines(draft, plan)
        self.clock = 0.0
        self.link_free = 0.0
        self.leaving: OrderedDict[int, float] = OrderedDict()
        """Slot -> when its copy is done, in order of issue."""
        self.unhurried: deque[int] = deque()
        """Those without a deadline."""
        self.due: dict[int, list[int]] = {}
        """Step -> the slots that the plan wants gone by then."""
        self.leaving_bytes = 0

    def run(self) -> Draft:
        draft = self.draft
        steps: list[Step] = []
        held = occupancy(self.problem, draft)
        for index, step in enumerate(draft.steps):
            if index == draft.boundary and steps:
                self._make_room(held.between, steps[-1].after)
            before: list[Action] = []
            self._let_go_of_what_is_due(index, before)
            self._make_room(held.steps[index], before)
            self.clock += self.problem.profile.seconds[step.run.op]
            steps.append(Step(before + step.before, step.run, self._copy_out(step)))
        while self.leaving:
            self._let_go(next(iter(self.leaving)), steps[-1].after)
        return replace(draft, steps=steps)

    def _let_go(self, slot: int, actions: list[Action]) -> None:
        """Wait for the copy of `slot`, and free it."""
        self.clock = max(self.clock, self.leaving.pop(slot))
        self.leaving_bytes -= self.draft.slots[slot].nbytes
        actions.append(Free(slot))

    def _make_room(self, held_bytes: int, actions: list[Action]) -> None:
        """Let go of the oldest until what is left fits beside `held_bytes`."""
        while self.leaving and held_bytes + self.leaving_bytes > self.problem.budget_bytes:
            self._let_go(next(iter(self.leaving)), actions)

    def _let_go_of_what_is_due(self, step: int, actions: list[Action]) -> None:
        for slot in self.due.pop(step, ()):
            if slot in self.leaving:
                self._let_go(slot, actions)
        while self.unhurried and self.leaving.get(self.unhurried[0], 0.0) <= self.clock:
            slot = self.unhurried.popleft()
            if slot in self.leaving:
                self._let_go(slot, actions)

    def _copy_out(self, step: Step) -> list[Action]:
        """Issue the step's copies out; returns what follows the run, without their frees."""
        slots = self.draft.slots
        copies = [
            a for a in step.after if isinstance(a, Copy) and slots[a.source].tier is Tier.DEVICE
        ]
        for copy in copies:
            slot = slots[copy.source]
            link = self.problem.hardware.link(Tier.DEVICE, slots[copy.target].tier)
            nbytes = self.problem.trace.buffers[slot.buffer].nbytes
            self.link_free = max(self.clock, self.link_free) + link.seconds(nbytes)
            self.leaving[slot.id] = self.link_free
            self.leaving_bytes += slot.nbytes
            deadline = self.deadlines.get((slot.buffer, step.run.op))
            if deadline is None:
                self.unhurried.append(slot.id)
            else:
                self.due.setdefault(deadline, []).append(slot.id)
        copied = {copy.source for copy in copies}
        return [a for a in step.after if not (isinstance(a, Free) and a.slot in copied)]


def _deadlines(draft: Draft, plan: Plan) -> dict[tuple[int, int], int]:
    """(buffer, op after which it leaves) -> the step the plan wants its memory free by."""
    first = draft.first_step()
    return {
        (gap.buffer, gap.after): first[choice.release]
        for gap, choice in plan.choices
        if isinstance(choice, Offload) and choice.release is not None
    }
