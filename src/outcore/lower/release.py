"""Pass `release`: let copies out overlap with the ops that follow, and free their sources later.

A copy out is issued right after the use, or at the plan's hint `depart`: while the op of that use
runs, or later. The device memory is freed before the step by which the copy should be done by the
profile's clock, or at the hint `release`. If memory is needed earlier, copies are issued and
sources are freed earlier, and compute waits there (PoocH section 4, "sync_swapout"). All positions
are fixed here, so the peak never depends on how long a copy really takes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from heapq import heappop, heappush

from outcore.ir.hardware import Tier
from outcore.ir.plan import Gap, Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Copy, Free
from outcore.lower.draft import Draft, Step, occupancy


def release(problem: Problem, plan: Plan, draft: Draft) -> Draft:
    """Move copies out to where the plan wants them, and the frees of their sources to their ends.

    Near-linear in actions.
    """
    return _Release(problem, plan, draft).run()


class _Release:
    """The simulated time of the compute stream, and the copies out that are waiting or running."""

    def __init__(self, problem: Problem, plan: Plan, draft: Draft) -> None:
        self.problem, self.draft = problem, draft
        self.hints = _hints(draft, plan)
        self.clock = 0.0
        self.link_free = 0.0
        self.waiting: dict[int, Copy] = {}
        """Outer slot -> the copy into it, not issued yet."""
        self.next_departure: list[tuple[int, int]] = []
        """A heap of (step, outer slot): when the plan wants each copy issued."""
        self.deadlines: dict[int, int | None] = {}
        """Slot whose copy is not issued yet -> the step by which the plan wants its memory free."""
        self.leaving: OrderedDict[int, float] = OrderedDict()
        """Slot whose copy is issued -> the time when that is done, in order of issue."""
        self.without_deadline: deque[int] = deque()
        """Slots of `leaving` without a deadline, in order of issue."""
        self.due: dict[int, list[int]] = {}
        """Step -> the slots whose memory the plan wants free by then."""
        self.held_bytes = 0
        """Bytes of the slots whose copies are waiting or running."""

    def run(self) -> Draft:
        draft = self.draft
        steps: list[Step] = []
        held = occupancy(self.problem, draft)
        for index, step in enumerate(draft.steps):
            last = steps[-1].after if steps else []
            self._depart(index, step, last)
            if index == draft.boundary and steps:
                self._make_room(held.between, last, last)
            before: list[Action] = []
            self._free_due_sources(index, before)
            self._make_room(held.steps[index], last, before)
            steps.append(self._run(index, Step(before + step.before, step.run, step.after)))
        while self.leaving:
            self._free_source(next(iter(self.leaving)), steps[-1].after)
        return replace(draft, steps=steps)

    # ---- issuing copies -------------------------------------------------------------------------

    def _run(self, index: int, step: Step) -> Step:
        """The step with its copies out where the plan wants them, their sources not freed yet."""
        slots = self.draft.slots
        copies = [
            a for a in step.after if isinstance(a, Copy) and slots[a.source].tier is Tier.DEVICE
        ]
        departs: dict[int, int] = {}
        for copy in copies:
            leaves = slots[copy.source].buffer, step.run.op
            depart, self.deadlines[copy.source] = self.hints[leaves]
            departs[copy.target] = index + 1 if depart is None else depart
        beside = [copy for copy in copies if departs[copy.target] == index]
        for copy in beside:
            self._start(copy)
        self.clock += self.problem.profile.cost(step.run.op, step.run.variant).seconds
        for copy in copies:
            self.held_bytes += slots[copy.source].nbytes
            if departs[copy.target] == index + 1:
                self._start(copy)
            elif departs[copy.target] > index:
                self.waiting[copy.target] = copy
                heappush(self.next_departure, (departs[copy.target], copy.target))
        freed = {copy.source for copy in copies}
        moved = {outer for outer, at in departs.items() if at != index + 1}
        issued: list[Action] = [action for copy in beside for action in (Alloc(copy.target), copy)]
        after = [a for a in step.after if not _concerns(a, freed, moved)]
        return Step(step.before + issued, step.run, after)

    def _depart(self, index: int, step: Step, actions: list[Action]) -> None:
        """Issue copies whose departure is due, or whose outer slot `step` reads or frees."""
        while self.next_departure and self.next_departure[0][0] <= index:
            self._issue(heappop(self.next_departure)[1], actions)
        for action in (*step.before, *step.after) if self.waiting else ():
            if isinstance(action, Copy):
                self._issue(action.source, actions)
            elif isinstance(action, Free):
                self._issue(action.slot, actions)

    def _issue(self, outer: int, actions: list[Action]) -> None:
        """Issue the copy into `outer` if it is still waiting."""
        copy = self.waiting.pop(outer, None)
        if copy is not None:
            actions += [Alloc(outer), copy]
            self._start(copy)

    def _start(self, copy: Copy) -> None:
        """Schedule a copy that is issued now on the link's clock."""
        slot, target = self.draft.slots[copy.source], self.draft.slots[copy.target]
        link = self.problem.hardware.link(Tier.DEVICE, target.tier)
        nbytes = self.problem.trace.buffers[slot.buffer].nbytes
        self.link_free = max(self.clock, self.link_free) + link.seconds(nbytes)
        self.leaving[slot.id] = self.link_free
        deadline = self.deadlines.pop(slot.id)
        if deadline is None:
            self.without_deadline.append(slot.id)
        else:
            self.due.setdefault(deadline, []).append(slot.id)

    # ---- freeing their sources ------------------------------------------------------------------

    def _free_source(self, slot: int, actions: list[Action]) -> None:
        """Wait for the copy of `slot`, then free it."""
        self.clock = max(self.clock, self.leaving.pop(slot))
        self.held_bytes -= self.draft.slots[slot].nbytes
        actions.append(Free(slot))

    def _make_room(self, other_bytes: int, last: list[Action], actions: list[Action]) -> None:
        """Free sources, the oldest copy first, until the rest fits next to `other_bytes`.

        Copies that are running come first. When there are none, the waiting copy with the earliest
        departure is issued, into `last`.
        """
        while other_bytes + self.held_bytes > self.problem.budget_bytes:
            while self.waiting and not self.leaving:
                self._issue(heappop(self.next_departure)[1], last)
            if not self.leaving:
                break
            self._free_source(next(iter(self.leaving)), actions)

    def _free_due_sources(self, step: int, actions: list[Action]) -> None:
        for slot in self.due.pop(step, ()):
            if slot in self.leaving:
                self._free_source(slot, actions)
        while (
            self.without_deadline and self.leaving.get(self.without_deadline[0], 0.0) <= self.clock
        ):
            slot = self.without_deadline.popleft()
            if slot in self.leaving:
                self._free_source(slot, actions)


def _concerns(action: Action, freed: set[int], filled: set[int]) -> bool:
    """Whether `action` frees one of `freed`, or allocates or fills one of `filled`."""
    if isinstance(action, Free):
        return action.slot in freed
    if isinstance(action, Copy):
        return action.target in filled
    return isinstance(action, Alloc) and action.slot in filled


def _hints(draft: Draft, plan: Plan) -> dict[tuple[int, int], tuple[int | None, int | None]]:
    """(buffer, op of the use) -> the steps of `depart` and `release`, each None without that hint.

    At `release` the memory is free before the op's own run. At `depart` the copy is issued before
    the reruns for that op too, as copies back for the same op are.
    """
    own, first = draft.first_step(), draft.first_step_for()

    def departure(gap: Gap, depart: int | None) -> int | None:
        if depart is None:
            return None
        return own[depart] if depart == gap.after else first[depart]

    return {
        (gap.buffer, gap.after): (
            departure(gap, choice.depart),
            None if choice.release is None else own[choice.release],
        )
        for gap, choice in plan.choices
        if isinstance(choice, Offload)
    }
