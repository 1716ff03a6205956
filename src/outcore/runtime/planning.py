"""planning: from a graph and its profile to a program, beside other calls and graphs of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from outcore.errors import InfeasibleError
from outcore.execute import Driver
from outcore.gc_paused import gc_paused
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, pause_bytes, peak, retained_bytes
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline
from outcore.lower import lower
from outcore.policies import Policy, floor_plan, lean_plans, leanest_plan
from outcore.policies.chen import ChenSqrt
from outcore.policies.recompute_all import RecomputeAll
from outcore.runtime.calls import Calls, call_tensor_bytes, gradient_bytes
from outcore.runtime.drift import Drift, Replanned
from outcore.runtime.external import ExternalMemory, Room
from outcore.runtime.margin import margin_bytes
from outcore.runtime.options import Settings
from outcore.runtime.planned import Planned
from outcore.runtime.profiling import Profiling
from outcore.runtime.shares import Shares
from outcore.runtime.solving import Solver
from outcore.simulate import simulate

if TYPE_CHECKING:  # graphs are planned through here
    from outcore.runtime.graph import PlannedGraph

T = TypeVar("T")

TIGHTER_DIVISOR = 10
"""A plan that ran out of device memory is made again with the budget over this left free."""

ROOM_DIVISOR = 32
"""The room for what stays is found to within the budget over this: plans with less room keep more,
of which more stays."""

_RECOMPUTING: tuple[Policy, ...] = (ChenSqrt(), RecomputeAll())
"""Policies that run again what does not fit, the one that is faster to differentiate first."""


class Planner:
    """What plans the graphs of one budget, each beside the others and beside its other calls."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.solver = Solver(settings, driver)
        self._known: WeakKeyDictionary[PlannedGraph, Calls] = WeakKeyDictionary()

    def shares(self, graph: PlannedGraph, active: Sequence[PlannedGraph]) -> Shares:
        """What `graph` may have, one of those `active`."""
        solver = self.solver
        state_bytes = solver.driver.generator.get_state().nbytes
        budget, at_least = solver.settings.budget_bytes, graph.status.left_at_least
        return Shares(graph, active, budget, state_bytes, self._known, at_least)

    @gc_paused()
    def floor_program(
        self, shares: Shares, resident_bytes: int, *, leanest: bool = False
    ) -> tuple[Program, int]:
        """The program of the profiled steps, and how much may be held besides while it fits.

        Nothing overlaps; with `leanest` nothing takes less. Raises InfeasibleError where even that
        does not fit the budget.
        """
        problem = self._unmeasured(shares, resident_bytes)
        make = leanest_plan if leanest else floor_plan
        try:
            problem, plan = self.solver.solve(shares, problem, make)
        except InfeasibleError as error:
            error.at_least = True
            raise
        program = lower(replace(problem, budget_bytes=1), plan, fast=True)
        spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
        return program, resident_bytes + spare

    @gc_paused()
    def still_program(self, shares: Shares, resident_bytes: int) -> tuple[Program, int]:
        """The program that moves least, and how much may be held besides while it fits.

        It keeps everything. Workspaces are not known: half of the budget is left to them, and to
        other graphs. Where that is too much it runs ops again, if that fits: a forward call takes
        no longer for it, and leaves less.
        """
        problem = self._unmeasured(shares, resident_bytes)
        program = self.solver.kept(problem)
        spare = problem.budget_bytes // 2 - peak(problem, program, Tier.DEVICE).nbytes
        for policy in _RECOMPUTING if spare < 0 else ():
            with contextlib.suppress(InfeasibleError):
                plan = policy.plan(problem)
                program = lower(replace(problem, budget_bytes=1), plan, fast=True)
                spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
            if spare >= 0:
                break
        return program, resident_bytes + spare

    def _unmeasured(self, shares: Shares, resident_bytes: int) -> Problem:
        profile = Profile.unknown(len(shares.graph.captured.trace.ops))
        return shares.problem(self.solver.hardware(), profile, resident_bytes)

    @gc_paused()
    def plan(self, shares: Shares, profiled: Profiling, *, lean: bool = False) -> Planned:
        """Plan a graph from what was measured. Everything is kept where that fits.

        `lean`: graphs without a plan may be left the least, as no call of one waits.
        Raises InfeasibleError where no plan of the policy fits the budget. Where other graphs have
        no plan yet, or take turns with it, the budget it names is the least that may do.
        """
        external = ExternalMemory(
            base_bytes=profiled.base_bytes or 0,
            lingering_bytes=profiled.lingering_bytes,
            returning_bytes=shares.graph.observed.returned.beyond_bytes(),
            between_bytes=profiled.between_bytes,
            gone=profiled.gone,
            late_bytes=shares.late_bytes(),
        )
        hardware = self.solver.hardware()
        rooms = [*shares.rooms(hardware, external)]
        if lean:
            rooms += replace(shares, unplanned_lean=True).rooms(hardware, external)[-1:]
        try:
            return _first(partial(self._beside, shares, profiled, external), rooms)
        except InfeasibleError as error:
            others = (graph for graph in shares.active if graph is not shares.graph)
            error.at_least |= any(graph.planned is None for graph in others) or bool(shares.in_turn)
            left_over = shares.graph.status.left_over(shares.budget_bytes)
            if left_over:
                error.add_note(left_over)
            raise

    def _beside(
        self, shares: Shares, profiled: Profiling, external: ExternalMemory, room: Room
    ) -> Planned:
        """The plan of a graph with so much held besides. Raises InfeasibleError as `plan`."""
        hardware, profile = self.solver.hardware(), profiled.profile()
        between = max(
            profiled.between_bytes,
            shares.in_turn_bytes(hardware),
            shares.paused_bytes(hardware, external, room),
        )
        problem = shares.problem(hardware, profile, room.nbytes, between)
        retained = shares.graph.status.retained
        planned = self._planned(shares, problem, external, room, in_haste=retained)
        if retained:
            planned = self._retaining(shares, planned)
        taken = None
        if profiled.timed.program is not None:
            taken = Calls(problem, 1, others=True).taken(profiled.timed.program)
        return replace(planned, profiled=taken)

    @gc_paused()
    def plan_for_calls(self, shares: Shares, planned: Planned) -> Planned:
        """The same for as many calls as waited at once. Raises InfeasibleError as `plan` does."""
        calls = shares.graph.status.planned_for - planned.calls
        more = calls * call_tensor_bytes(planned.problem.trace)
        beside = replace(planned, external_bytes=planned.external_bytes + more)
        outside = planned.problem.outside_bytes + more
        return self._as_before(shares, beside, replace(planned.problem, outside_bytes=outside))

    @gc_paused()
    def plan_beside_calls(self, shares: Shares, planned: Planned) -> Planned:
        """The same with room for what calls of other graphs may hold by now.

        Raises InfeasibleError as `plan` does.
        """
        return self._or_afresh(shares, planned, planned.problem, headroom=True)

    @gc_paused()
    def plan_leaving(self, shares: Shares, planned: Planned, more_bytes: int) -> Planned:
        """The same with more left to later graphs. Raises InfeasibleError as `plan` does."""
        at_least = max(shares.left_at_least, left_bytes(planned) + more_bytes)
        return self._or_afresh(replace(shares, left_at_least=at_least), planned, planned.problem)

    def lacking_bytes(self, shares: Shares, planned: Planned) -> int:
        """How much more may be held besides than `planned` has room for, waiting calls among it.

        In one mix that was seen, or between calls. Negative where that is less.
        """
        hardware, external = self.solver.hardware(), planned.external
        _, of_one = shares.rooms(hardware, external, planned.calls)
        paused = shares.paused_bytes(hardware, external, Room(planned.external_bytes))
        lacking, between = of_one.nbytes - planned.external_bytes, planned.problem.between_bytes
        beyond = paused - between - margin_bytes(shares.budget_bytes)
        return max(lacking, beyond) if beyond > 0 else lacking

    def _retaining(self, shares: Shares, planned: Planned) -> Planned:
        """The same with room for all that crosses until backward ends: `retain_graph` asks for it.

        It looks in haste for how much that is. Raises InfeasibleError where no plan found has it.
        """
        make = partial(self._with_room_for_retained, shares, planned)
        step = planned.problem.budget_bytes // ROOM_DIVISOR
        found, least, room, most = None, 0, _retained_bytes(planned), None
        while most is None or most - least > step:
            try:
                tried = make(room, in_haste=True)
            except InfeasibleError as error:
                error.at_least = True  # a plan beside so little may keep more than that
                refusal, most = error, room
            else:
                needed = _retained_bytes(tried)
                if needed <= room:
                    found, most = tried, room
                else:
                    least = room
            room = max(needed, room + step) if most is None else (least + most) // 2
        if found is None:
            try:
                raise refusal
            finally:
                del refusal  # as in `_within`
        if self.solver.may_haste and not found.everything_kept:
            room = found.retaining_bytes or 0
            with contextlib.suppress(InfeasibleError):
                slowly = make(room)
                if _retained_bytes(slowly) <= room:
                    return slowly
        return found

    def _with_room_for_retained(
        self, shares: Shares, planned: Planned, room: int, *, in_haste: bool = False
    ) -> Planned:
        """The plan for the problem of `planned` with `room` for what `retain_graph` keeps."""
        problem, external = planned.alone, Room(planned.external_bytes)
        wider = replace(problem, outside_bytes=problem.outside_bytes + room)
        tried = self._planned(shares, wider, planned.external, external, in_haste=in_haste)
        return replace(tried, retaining_bytes=room)

    def _as_before(
        self, shares: Shares, planned: Planned, problem: Problem, *, headroom: bool = False
    ) -> Planned:
        """A plan for `problem`, which is that of `planned` but for times or less memory.

        With room for what `retain_graph` keeps, where `planned` has some. Calls of other graphs may
        hold more by now; if there is no plan beside that, and none is asked for (`headroom`), they
        have the room that they had. Raises as `_planned`.
        """
        rooms = [*shares.rooms(self.solver.hardware(), planned.external)]
        if not headroom and planned.external_bytes < rooms[-1].nbytes:
            rooms.append(Room(planned.external_bytes))
        return _first(partial(self._again_beside, shares, planned, problem), rooms)

    def _or_afresh(
        self, shares: Shares, planned: Planned, problem: Problem, *, headroom: bool = False
    ) -> Planned:
        """`_as_before`; where later graphs take too much for that, they are left what they need.

        They are planned again as they come. Raises as `_as_before`.
        """
        try:
            return self._as_before(shares, planned, problem, headroom=headroom)
        except InfeasibleError:
            if not shares.later:
                raise
            afresh = replace(shares, afresh=True)
            return self._as_before(afresh, planned, problem, headroom=headroom)

    def _again_beside(
        self, shares: Shares, planned: Planned, problem: Problem, room: Room
    ) -> Planned:
        """The same with so much held besides."""
        more = room.nbytes - planned.external_bytes
        more -= planned.problem.outside_bytes - planned.alone.outside_bytes
        alone = replace(problem, outside_bytes=problem.outside_bytes + more)
        between = [shares.paused_bytes(self.solver.hardware(), planned.external, room)]
        if shares.later:  # whose plans are made: this one may hold more than they found
            between += shares.left_bytes(alone, planned.external.between_bytes)[-1:]
        alone = replace(alone, between_bytes=max(alone.between_bytes, *between))
        retained = planned.retaining_bytes is not None
        again = self._planned(shares, alone, planned.external, room, in_haste=retained)
        if retained:
            again = self._retaining(shares, again)
        return replace(again, replanned=planned.replanned, profiled=planned.profiled)

    @gc_paused()
    def plan_tighter(self, shares: Shares, planned: Planned) -> Planned:
        """The same with less of the budget. Raises InfeasibleError where no plan fits."""
        problem, tighter = planned.problem, planned.problem.budget_bytes // TIGHTER_DIVISOR
        problem = replace(problem, outside_bytes=problem.outside_bytes + tighter)
        return self._as_before(shares, planned, problem)

    @gc_paused()
    def plan_beside_more(self, shares: Shares, planned: Planned, base_bytes: int) -> Planned:
        """The same with `base_bytes` held besides. Raises InfeasibleError where no plan fits."""
        _, of_one = shares.rooms(self.solver.hardware(), planned.external)
        unused = max(0, planned.external_bytes - of_one.nbytes)
        more = max(0, base_bytes - planned.external.base_bytes - unused)
        problem = planned.problem
        problem = replace(problem, outside_bytes=problem.outside_bytes + more)
        external = replace(planned.external, base_bytes=base_bytes)
        room = planned.external_bytes + more
        beside = replace(planned, external=external, external_bytes=room)
        return self._or_afresh(shares, beside, problem)

    @gc_paused()
    def plan_again(
        self,
        shares: Shares,
        planned: Planned,
        problem: Problem,
        drift: Drift,
    ) -> tuple[Planned, ...]:
        """Plans for `problem`, which is that of `planned` with other times, the best first.

        The last one is always that of `planned`, as `problem` sees it; another comes before it
        where it is predicted to be faster. What other graphs hold by now is left to them.
        """
        retained, gone = shares.graph.status.retained, planned.external.gone
        calls = Calls(planned.alone, planned.calls, retained=retained, gone=gone)
        outside = problem.outside_bytes - planned.others_bytes
        stays = replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=self._in_core(shares, replace(problem, outside_bytes=outside), calls, planned),
            replanned=Replanned(drift, changed=False),
        )
        other = self._other(shares, planned, problem)
        if other is None or other.predicted.seconds >= stays.predicted.seconds:
            return (stays,)
        again = Replanned(drift, changed=True)
        return replace(other, replanned=again), stays

    def _other(
        self,
        shares: Shares,
        planned: Planned,
        problem: Problem,
    ) -> Planned | None:
        """What the policy makes of `problem`, that of `planned` with other times.

        None where it has no plan within what is left.
        """
        capacity = problem.hardware.capacity
        host, disk = (shares.outer(tier, capacity(tier)) for tier in (Tier.HOST, Tier.DISK))
        problem = replace(problem, host_budget_bytes=host, disk_budget_bytes=disk)
        try:
            return self._as_before(shares, planned, problem)
        except InfeasibleError:
            return None

    def _planned(
        self,
        shares: Shares,
        problem: Problem,
        external: ExternalMemory,
        room: Room,
        *,
        in_haste: bool = False,
    ) -> Planned:
        """The plan for `problem`, that of one call, with room for later graphs, and other calls.

        Raises InfeasibleError where the policy has none.
        """
        left = shares.left_bytes(problem, external.between_bytes)
        between = (max(problem.between_bytes, each) for each in left)
        status = shares.graph.status
        calls = Calls(
            problem,
            status.planned_for,
            retained=status.retained,
            gone=external.gone,
            spare_bytes=room.spare_bytes,
        )
        planned = _first(partial(self._leaving, shares, calls, in_haste=in_haste), between)
        return replace(planned, external=external, external_bytes=room.nbytes)

    def _leaving(self, shares: Shares, calls: Calls, left_bytes: int, *, in_haste: bool) -> Planned:
        """The same with so much left for what runs while this one waits."""
        problem = calls.problem
        leaving = replace(calls, problem=replace(problem, between_bytes=left_bytes))
        found = self._within(shares, leaving, problem, in_haste=in_haste)
        if found is None and calls.rereadable:
            found = self._rereading(shares, leaving, problem, in_haste=in_haste)
        return found or self._leanest(shares, leaving, problem)

    def _rereading(
        self, shares: Shares, calls: Calls, problem: Problem, *, in_haste: bool
    ) -> Planned | None:
        """The same with room for what plans may read again; None where there is none.

        No policy knows that what it reads again is there the longer for it.
        """
        more = calls.number * sum(problem.trace.buffers[b].nbytes for b in calls.rereadable)
        outside = calls.problem.outside_bytes + more
        headroom = replace(calls, problem=replace(calls.problem, outside_bytes=outside))
        with contextlib.suppress(InfeasibleError):
            return self._within(shares, headroom, problem, in_haste=in_haste)
        return None

    def _leanest(self, shares: Shares, calls: Calls, problem: Problem) -> Planned:
        """The fastest of the plans that take the least, for all `calls`.

        The policy's do not fit beside what they hold in other calls, or read again. Raises
        InfeasibleError where these do not either.
        """
        as_it_is, limit = replace(calls, problem=problem), problem.limit_bytes(Tier.DEVICE)
        found, lacking = [], []
        for beside, plan in product(calls.problems(), lean_plans(problem)):
            planned = self._as_it_is(shares, self.solver.under(beside, plan), as_it_is)
            if fits(planned.problem, planned.program):
                found.append(planned)
            taken = peak(planned.problem, planned.program, Tier.DEVICE).nbytes
            lacking.append(max(0, taken - limit))
        if not found:
            raise calls.refusal(min(lacking))
        return min(found, key=lambda planned: planned.predicted.seconds)

    def _within(
        self, shares: Shares, calls: Calls, problem: Problem, *, in_haste: bool
    ) -> Planned | None:
        """The fastest plan for all `calls`, as `problem` sees it, which is that of one of them.

        None where there are plans, but none that fits so. Raises InfeasibleError where the policy
        has none. Beside others it looks in haste at how much room they should have.
        """
        hasty = self.solver.may_haste and (in_haste or calls.number > 1)
        as_it_is = replace(calls, problem=problem)
        found: list[tuple[Planned, Problem]] = []
        made, refusal = 0, None
        for beside in calls.problems():
            try:
                planned = self.solver.planned(shares, beside, in_haste=hasty)
            except InfeasibleError as error:
                error.at_least |= calls.number > 1
                refusal = error
                continue
            made += 1
            planned = self._as_it_is(shares, planned, as_it_is)
            if calls.number == 1 and not calls.reread_bytes(planned.program):
                return planned
            if fits(planned.problem, planned.program):
                found.append((planned, beside))
            if planned.everything_kept:
                break
        if refusal is not None and not made:
            try:
                raise refusal
            finally:
                del refusal  # whose frames hold it, and what the step made
        if not found:
            return None
        best, beside = min(found, key=lambda pair: pair[0].predicted.seconds)
        if best.everything_kept or in_haste or not hasty:
            return best
        slowly = self._as_it_is(shares, self.solver.planned(shares, beside), as_it_is)
        better = slowly.predicted.seconds < best.predicted.seconds
        return slowly if better and fits(slowly.problem, slowly.program) else best

    def _as_it_is(self, shares: Shares, planned: Planned, calls: Calls) -> Planned:
        """`planned`, with what other calls hold and what was seen to be between, not their room."""
        outside = calls.problem.outside_bytes
        others = calls.others_bytes(planned.program)
        problem = replace(
            planned.problem,
            budget_bytes=calls.problem.budget_bytes,
            outside_bytes=outside + others,
            between_bytes=calls.problem.between_bytes + calls.reread_bytes(planned.program),
        )
        return replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=self._in_core(shares, replace(problem, outside_bytes=outside), calls, planned),
            calls=calls.number,
            others_bytes=others,
        )

    def _in_core(
        self, shares: Shares, problem: Problem, calls: Calls, planned: Planned
    ) -> Timeline:
        """What a call would do were everything kept, by all calls and by later graphs.

        Where that is so, later graphs count what they find.
        """
        kept = self.solver.kept(problem)
        outside, between = problem.outside_bytes + calls.others_bytes(kept), problem.between_bytes
        if not planned.everything_kept:
            between = max(between, shares.most_bytes(problem.hardware))
        return simulate(replace(problem, outside_bytes=outside, between_bytes=between), kept)


def left_bytes(planned: Planned) -> int:
    """What the budget leaves while a call of a plan waits for its backward."""
    return pause_bytes(planned.problem, planned.program)


def _first(make: Callable[[T], Planned], rooms: Iterable[T]) -> Planned:
    """What is made with the first of `rooms` with which something is.

    Raises InfeasibleError, that for the last one, where nothing is.
    """
    *more, last = dict.fromkeys(rooms)
    for room in more:
        with contextlib.suppress(InfeasibleError):
            return make(room)
    return make(last)


def _retained_bytes(planned: Planned) -> int:
    """What a backward call that leaves all as it was takes beyond the plan's peak.

    With the gradients that it made beside those of the next, twice: autograd may copy what it adds
    to them.
    """
    problem = planned.problem
    return retained_bytes(problem, planned.program) + 2 * gradient_bytes(problem.trace)
