"""planning: make the plan of one graph, with room for the other calls and graphs of the step.

A graph is planned alone (decision 0004). What the rest of the step holds enters its `Problem` as
two numbers: `outside_bytes`, memory held outside the graph throughout, and `between_bytes`, memory
that the rest of the step needs between the graph's two calls. Most methods here choose these
numbers, let `Solver` make a plan, and then evaluate that plan with what is really held.

A call is outstanding, or waits, from the end of its forward call until its backward call begins.
"External" memory is what the process holds that is not the graph's own.
"""

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
from outcore.ir.memory import fits, held_bytes, pause_bytes, peak, retained_bytes
from outcore.ir.plan import make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Free, Program
from outcore.ir.store import digest
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Trace
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

if TYPE_CHECKING:  # only for annotations: graphs are planned through here
    from outcore.runtime.graph import PlannedGraph

T = TypeVar("T")

TIGHTER_DIVISOR = 10
"""After an out-of-memory error the graph is planned again with the budget divided by this left
free."""

ROOM_DIVISOR = 32
"""`_retaining` finds the room for retained memory to within the budget divided by this.

It has to search: with less room set aside, a plan keeps more, and more of that is retained.
"""

_RECOMPUTING: tuple[Policy, ...] = (ChenSqrt(), RecomputeAll())
"""Policies for `forward_only_program` that recompute what does not fit, the faster backward
first."""


class Planner:
    """Plans the graphs of one budget, each with room for the others and for its own other calls."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.solver = Solver(settings, driver)
        self._known: WeakKeyDictionary[PlannedGraph, Calls] = WeakKeyDictionary()

    def shares(self, graph: PlannedGraph, active: Sequence[PlannedGraph]) -> Shares:
        """The part of the budget for `graph`, which is one of the `active` graphs."""
        solver = self.solver
        state_bytes = solver.driver.generator.get_state().nbytes
        budget, at_least = solver.settings.budget_bytes, graph.status.left_at_least
        return Shares(graph, active, budget, state_bytes, self._known, at_least)

    @gc_paused()
    def floor_program(
        self,
        shares: Shares,
        resident_bytes: int,
        workspace_bytes: Sequence[int] | None = None,
        *,
        leanest: bool = False,
    ) -> tuple[Program, int]:
        """The program for profiled steps, and the most external bytes with which it fits.

        Copies do not overlap with compute, which keeps memory low. `leanest`: use the plan that
        needs the least memory of all. `workspace_bytes`: an estimate, for which there is room if
        any such program has it; if none has, the leanest plan is used. Raises InfeasibleError if
        even that does not fit the budget.
        """
        problem = self._unmeasured(shares, resident_bytes)
        if workspace_bytes is not None:
            profile = replace(problem.profile, workspace_bytes=tuple(workspace_bytes))
            roomy = replace(problem, profile=profile)
            with contextlib.suppress(InfeasibleError):
                return self._floor_program(shares, roomy, resident_bytes, leanest=leanest)
            leanest = True
        return self._floor_program(shares, problem, resident_bytes, leanest=leanest)

    def _floor_program(
        self, shares: Shares, problem: Problem, resident_bytes: int, *, leanest: bool
    ) -> tuple[Program, int]:
        """As `floor_program`, for `problem`."""
        make = leanest_plan if leanest else floor_plan
        try:
            problem, plan = self.solver.solve(shares, problem, make)
        except InfeasibleError as error:
            error.at_least = True
            raise
        self.solver.prepare(problem)
        program = lower(replace(problem, budget_bytes=1), plan, fast=True)
        spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
        return program, resident_bytes + spare

    @gc_paused()
    def lean_program(
        self, shares: Shares, planned: Planned, held_bytes: int, between_bytes: int
    ) -> Program:
        """A program of little memory for one call of a planned graph.

        `held_bytes`: all that is held outside the call; `between_bytes`: what is made while it
        waits. Raises InfeasibleError if even the leanest program does not fit beside that.
        """
        hardware, profile = self.solver.hardware(), planned.problem.profile
        problem = shares.problem(hardware, profile, held_bytes, between_bytes)
        problem, plan = self.solver.solve(shares, problem, floor_plan)
        return lower(replace(problem, budget_bytes=1), plan, fast=True)

    @gc_paused()
    def forward_only_program(
        self, shares: Shares, resident_bytes: int, profiled: Program
    ) -> tuple[Program, int]:
        """The program for calls that nobody differentiates, and the most external bytes with it.

        It keeps everything if that fits in half of the budget; the other half is left for
        workspaces, which are not known, and for other graphs. If not, it recomputes in backward: a
        forward call takes no longer for it, and leaves less. That has to fit in the whole budget,
        and a forward call may need no more than with `profiled`, the program of profiled steps, so
        that as much is left for workspaces.
        """
        problem = self._unmeasured(shares, resident_bytes)
        program = self.solver.kept(problem)
        spare = problem.budget_bytes // 2 - peak(problem, program, Tier.DEVICE).nbytes
        most = _forward_peak_bytes(problem, profiled)
        for policy in _RECOMPUTING if spare < 0 else ():
            with contextlib.suppress(InfeasibleError):
                plan = policy.plan(problem)
                again = lower(replace(problem, budget_bytes=1), plan, fast=True)
                if _forward_peak_bytes(problem, again) <= most:
                    program = again
                    spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
            if spare >= 0:
                break
        return program, resident_bytes + spare

    def _unmeasured(self, shares: Shares, resident_bytes: int) -> Problem:
        profile = Profile.unknown(len(shares.graph.captured.trace.ops))
        return shares.problem(self.solver.hardware(), profile, resident_bytes)

    @gc_paused()
    def plan(
        self, shares: Shares, profiled: Profiling, *, lean: bool = False, as_profiled: bool = False
    ) -> Planned:
        """The first plan of a graph, from its profile. Everything is kept if that fits.

        `lean`: graphs without a plan may be left the least that they need, as none of them waits.
        `as_profiled`: calls may hold no more while they wait than they did while profiled.

        Raises InfeasibleError if no plan of the policy fits the budget. If other graphs have no
        plan yet, or alternate with this one within a step, the budget that the error names is only
        a lower bound.
        """
        external = shares.measured(profiled)
        hardware = self.solver.hardware()
        rooms = [*shares.rooms(hardware, external)]
        if lean:
            rooms += replace(shares, unplanned_lean=True).rooms(hardware, external)[-1:]
        try:
            make = partial(self._beside, shares, profiled, external, as_profiled=as_profiled)
            return _first(make, rooms)
        except InfeasibleError as error:
            others = (graph for graph in shares.active if graph is not shares.graph)
            error.at_least |= any(graph.planned is None for graph in others) or bool(
                shares.alternating
            )
            left_over = shares.graph.status.left_over(shares.budget_bytes)
            if left_over:
                error.add_note(left_over)
            raise

    def _beside(
        self,
        shares: Shares,
        profiled: Profiling,
        external: ExternalMemory,
        room: Room,
        *,
        as_profiled: bool,
    ) -> Planned:
        """The plan with `room` for external memory. Raises InfeasibleError as `plan` does."""
        hardware, profile = self.solver.hardware(), profiled.profile()
        between = max(
            profiled.between_bytes,
            shares.in_turn_bytes(hardware, external, room),
            shares.paused_bytes(hardware, external, room),
        )
        problem = shares.problem(hardware, profile, room.nbytes, between)
        more = max(0, pause_bytes(problem, profiled.program) - between) if as_profiled else 0
        problem = replace(problem, between_bytes=between + more)
        retained = shares.graph.status.retained
        planned = self._planned(shares, problem, external, room, in_haste=retained)
        if retained:
            planned = self._retaining(shares, planned)
        if more:  # that much is left free, but nothing needs it yet
            planned = self._needing_less(shares, planned, more)
        taken = Calls(problem, 1, others=True).taken(profiled.program)
        return replace(planned, profiled=taken, early=profiled.early, bounded=as_profiled)

    def _needing_less(self, shares: Shares, planned: Planned, less_bytes: int) -> Planned:
        """The same plan, evaluated with `less_bytes` less needed between the two calls."""
        between = planned.problem.between_bytes - less_bytes
        problem = replace(planned.problem, between_bytes=between)
        if not planned.everything_kept:
            between = max(between, shares.most_bytes(problem.hardware))
        in_core = replace(problem, between_bytes=between)
        return replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=simulate(in_core, self.solver.kept(problem)),
        )

    @gc_paused()
    def lent(
        self,
        shares: Shares,
        lender: Planned,
        profile: Profile,
        leaving_bytes: int,
        floor: Program | None = None,
    ) -> tuple[Planned, int] | None:
        """The plan `lender`, which is for larger sizes, for the sizes of the graph of `shares`.

        Also the bytes that its checked steps leave of the budget. They hold inputs until the call
        comes back. `profile` is for the graph's sizes; `leaving_bytes` are left to later graphs
        while it waits, and no less than the program `floor` leaves, if that is given. If everything
        fits at its sizes, it is kept. What is held outside the graph is taken to be as at the
        larger sizes. A layout is not taken over: the allocator gets room instead. None if checked
        steps do not fit.
        """
        captured, solver = shares.graph.captured, self.solver
        trace, capacity = captured.trace, lender.problem.hardware.capacity
        host, disk = (shares.outer(tier, capacity(tier)) for tier in (Tier.HOST, Tier.DISK))
        problem = replace(
            lender.problem,
            trace=trace,
            profile=profile,
            host_budget_bytes=host,
            disk_budget_bytes=disk,
        )
        between = max(problem.between_bytes, leaving_bytes)
        pause = 0 if floor is None else pause_bytes(problem, floor)
        least = solver.settings.rooms[0]
        room = lender.room_bytes if lender.layout is None else least
        plan, digests = lender.plan, (digest(problem), digest(trace))
        moving = make_plan(plan.by_gap, plan.policy, *digests, plan.by_op)
        kept = solver.kept(problem)
        for plan, left in ((make_plan({}, "keep-all"), 0), (moving, room)):
            less = replace(problem, budget_bytes=problem.budget_bytes - left, between_bytes=between)
            program = replace(kept, plan_digest=digest(plan))
            if plan.choices or plan.variants:
                waiting = replace(less, between_bytes=max(between, pause))
                program = lower(waiting, plan, fast=True)
            if pause_bytes(problem, program) < pause:
                continue
            held = checked_bytes(trace, program, lender.external.gone, captured.overwritten)
            spare = less.budget_bytes - peak(less, program, Tier.DEVICE).nbytes - held
            if spare >= 0 and fits(less, program):
                lent = replace(
                    lender,
                    problem=problem,
                    plan=plan,
                    program=program,
                    predicted=simulate(problem, program),
                    in_core=simulate(problem, kept),
                    profiled=None,
                    bounded=floor is not None,
                    checking_bytes=held,
                    room_bytes=left,
                    layout=None,
                    replanned=None,
                    note="",
                )
                return lent, spare
        return None

    def beside(self, planned: Planned, external_bytes: int) -> Planned:
        """The same plan with room for `external_bytes` of external memory, if that is more.

        The caller knows that it fits.
        """
        more = external_bytes - planned.external_bytes
        if more <= 0:
            return planned
        problem, external = planned.problem, planned.external
        problem = replace(problem, outside_bytes=problem.outside_bytes + more)
        return replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            external=replace(external, base_bytes=external.base_bytes + more),
            external_bytes=external_bytes,
        )

    @gc_paused()
    def plan_for_calls(self, shares: Shares, planned: Planned) -> Planned:
        """A new plan for the most outstanding calls seen. Raises InfeasibleError as `plan` does."""
        calls = shares.graph.status.planned_for - planned.calls
        more = calls * call_tensor_bytes(planned.problem.trace)
        beside = replace(planned, external_bytes=planned.external_bytes + more)
        outside = planned.problem.outside_bytes + more
        return self._as_before(shares, beside, replace(planned.problem, outside_bytes=outside))

    @gc_paused()
    def plan_beside_calls(self, shares: Shares, planned: Planned) -> Planned:
        """A new plan with room for what outstanding calls of other graphs may hold by now.

        Raises InfeasibleError as `plan` does.
        """
        return self._or_ignoring_plans(shares, planned, planned.problem, needs_room=True)

    @gc_paused()
    def plan_leaving(self, shares: Shares, planned: Planned, more_bytes: int) -> Planned:
        """A new plan that leaves `more_bytes` more than `planned` to later graphs.

        Raises InfeasibleError as `plan` does.
        """
        at_least = max(shares.left_at_least, left_bytes(planned) + more_bytes)
        return self._or_ignoring_plans(
            replace(shares, left_at_least=at_least), planned, planned.problem
        )

    def lacking_bytes(self, shares: Shares, planned: Planned) -> int:
        """External bytes, those of waiting calls included, that `planned` has no room for.

        The most in one mix of waiting calls that was seen, or between calls. Negative if there is
        room to spare.
        """
        hardware, external = self.solver.hardware(), planned.external
        _, of_one = shares.rooms(hardware, external, planned.calls)
        paused = shares.paused_bytes(hardware, external, Room(planned.external_bytes))
        lacking, between = of_one.nbytes - planned.external_bytes, planned.problem.between_bytes
        beyond = paused - between - margin_bytes(shares.budget_bytes)
        return max(lacking, beyond) if beyond > 0 else lacking

    def _retaining(self, shares: Shares, planned: Planned) -> Planned:
        """A plan like `planned`, with room for backward calls under `retain_graph`.

        Those free nothing. A search finds how much room they need, in haste if the policy can.
        Raises InfeasibleError if no plan was found that has the room.
        """
        make = partial(self._with_room_for_retained, shares, planned)
        step = planned.problem.budget_bytes // ROOM_DIVISOR
        found, least, room, most = None, 0, _retained_bytes(planned), None
        while most is None or most - least > step:
            try:
                tried = make(room, in_haste=True)
            except InfeasibleError as error:
                error.at_least = True  # a plan with less memory may also retain less than `room`
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
                del refusal  # its frames hold it, and what the step made
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
        """The plan for the problem of `planned` with `room` bytes for what `retain_graph` keeps."""
        problem, external = planned.alone, Room(planned.external_bytes)
        wider = replace(problem, outside_bytes=problem.outside_bytes + room)
        tried = self._planned(shares, wider, planned.external, external, in_haste=in_haste)
        return replace(tried, retaining_bytes=room)

    def _as_before(
        self, shares: Shares, planned: Planned, problem: Problem, *, needs_room: bool = False
    ) -> Planned:
        """A plan for `problem`, which is that of `planned` with other times or less memory.

        It has room for what `retain_graph` keeps if `planned` has. `needs_room`: it must have room
        for what calls of other graphs hold by now. Otherwise, if there is no such plan, they get
        the room that they had under `planned`. Raises as `_planned` does.
        """
        rooms = [*shares.rooms(self.solver.hardware(), planned.external)]
        if not needs_room and planned.external_bytes < rooms[-1].nbytes:
            rooms.append(Room(planned.external_bytes))
        return _first(partial(self._again_beside, shares, planned, problem), rooms)

    def _or_ignoring_plans(
        self, shares: Shares, planned: Planned, problem: Problem, *, needs_room: bool = False
    ) -> Planned:
        """As `_as_before`; if that fails, later graphs are left only the least they need.

        They are then planned again as they are called. Raises as `_as_before` does.
        """
        try:
            return self._as_before(shares, planned, problem, needs_room=needs_room)
        except InfeasibleError:
            if not shares.later:
                raise
            ignore_plans = replace(shares, ignore_plans=True)
            return self._as_before(ignore_plans, planned, problem, needs_room=needs_room)

    def _again_beside(
        self, shares: Shares, planned: Planned, problem: Problem, room: Room
    ) -> Planned:
        """A plan for `problem` with `room` for external memory in place of that of `planned`."""
        more = room.nbytes - planned.external_bytes
        more -= planned.problem.outside_bytes - planned.alone.outside_bytes
        alone = replace(problem, outside_bytes=problem.outside_bytes + more)
        hardware = self.solver.hardware()
        between = [
            shares.paused_bytes(hardware, planned.external, room),
            shares.in_turn_bytes(hardware, planned.external, room),
        ]
        if shares.later:  # they have plans, and this graph may hold more than they found
            between += shares.left_bytes(alone, planned.external)[-1:]
        alone = replace(alone, between_bytes=max(alone.between_bytes, *between))
        retained = planned.retaining_bytes is not None
        again = self._planned(shares, alone, planned.external, room, in_haste=retained)
        if retained:
            again = self._retaining(shares, again)
        return replace(
            again, replanned=planned.replanned, profiled=planned.profiled, early=planned.early
        )

    @gc_paused()
    def plan_tighter(self, shares: Shares, planned: Planned) -> Planned:
        """A new plan that uses less of the budget. Raises InfeasibleError if no plan fits."""
        problem, tighter = planned.problem, planned.problem.budget_bytes // TIGHTER_DIVISOR
        problem = replace(problem, outside_bytes=problem.outside_bytes + tighter)
        return self._as_before(shares, planned, problem)

    @gc_paused()
    def plan_beside_more(self, shares: Shares, planned: Planned, base_bytes: int) -> Planned:
        """A new plan with room for `base_bytes` of external memory (`ExternalMemory.base_bytes`).

        Raises InfeasibleError if no plan fits.
        """
        _, of_one = shares.rooms(self.solver.hardware(), planned.external)
        unused = max(0, planned.external_bytes - of_one.nbytes)
        more = max(0, base_bytes - planned.external.base_bytes - unused)
        problem = planned.problem
        problem = replace(problem, outside_bytes=problem.outside_bytes + more)
        external = replace(planned.external, base_bytes=base_bytes)
        room = planned.external_bytes + more
        beside = replace(planned, external=external, external_bytes=room)
        return self._or_ignoring_plans(shares, beside, problem)

    @gc_paused()
    def plan_again(
        self,
        shares: Shares,
        planned: Planned,
        problem: Problem,
        drift: Drift,
    ) -> tuple[Planned, ...]:
        """Plans for `problem`, which is that of `planned` with other times, the best first.

        The last one is always the program of `planned`, simulated with the new times. A new plan
        comes before it if it is predicted to be faster. It leaves other graphs what they hold by
        now.
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
        """The policy's plan for `problem`, which is that of `planned` with other times.

        None if the policy has no plan within what other graphs leave.
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
        """The plan for `problem`, with room for later graphs and for other calls of the graph.

        `problem` is that of one call. Raises InfeasibleError if the policy has no plan.
        """
        left = shares.left_bytes(problem, external)
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
        """The plan that leaves `left_bytes` for what runs while the graph waits.

        First the policy's plans, then those with room for buffers that are read again, then the
        leanest.
        """
        problem = calls.problem
        leaving = replace(calls, problem=replace(problem, between_bytes=left_bytes))
        found = self._within(shares, leaving, problem, in_haste=in_haste)
        if found is None and calls.rereadable:
            found = self._rereading(shares, leaving, problem, in_haste=in_haste)
        return found or self._leanest(shares, leaving, problem)

    def _rereading(
        self, shares: Shares, calls: Calls, problem: Problem, *, in_haste: bool
    ) -> Planned | None:
        """As `_within`, with room for buffers that a plan may read again; None if none fits.

        Policies do not know that such a buffer stays longer because the plan reads it again.
        """
        more = calls.number * sum(problem.trace.buffers[b].nbytes for b in calls.rereadable)
        outside = calls.problem.outside_bytes + more
        wider = replace(calls, problem=replace(calls.problem, outside_bytes=outside))
        with contextlib.suppress(InfeasibleError):
            return self._within(shares, wider, problem, in_haste=in_haste)
        return None

    def _leanest(self, shares: Shares, calls: Calls, problem: Problem) -> Planned:
        """The fastest of the leanest plans that fit, for all `calls`.

        It is used if the policy's plans do not fit with what they hold in other calls, or read
        again. Raises InfeasibleError if the leanest plans do not fit either.
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
        """The policy's fastest plan for all `calls`, evaluated under `problem`, that of one call.

        None if the policy has plans, but none that fits when evaluated so. Raises InfeasibleError
        if the policy has none. With several calls, plans are first made in haste, to see how much
        room the waiting calls should have.
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
                del refusal  # the error's frames hold the error itself, and what the step made
        if not found:
            return None
        best, beside = min(found, key=lambda pair: pair[0].predicted.seconds)
        if best.everything_kept or in_haste or not hasty:
            return best
        slowly = self._as_it_is(shares, self.solver.planned(shares, beside), as_it_is)
        better = slowly.predicted.seconds < best.predicted.seconds
        return slowly if better and fits(slowly.problem, slowly.program) else best

    def _as_it_is(self, shares: Shares, planned: Planned, calls: Calls) -> Planned:
        """`planned` with what other calls really hold in place of the room set aside for it.

        The same holds for what was seen between the graph's two calls.
        """
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
        """Timeline of a call if all calls of the graph, and later graphs, kept everything.

        If the plan does keep everything, later graphs count what they find, so nothing is added for
        them.
        """
        kept = self.solver.kept(problem)
        outside, between = problem.outside_bytes + calls.others_bytes(kept), problem.between_bytes
        if not planned.everything_kept:
            between = max(between, shares.most_bytes(problem.hardware))
        return simulate(replace(problem, outside_bytes=outside, between_bytes=between), kept)


def _forward_peak_bytes(problem: Problem, program: Program) -> int:
    """The device peak of the forward call alone."""
    held = held_bytes(problem, program, Tier.DEVICE)
    return max(held[: program.boundary], default=0)


def checked_bytes(
    trace: Trace, program: Program, gone: Iterable[int], overwritten: Iterable[int]
) -> int:
    """Bytes that a checked step holds in addition to what `program` holds.

    To be able to begin again, it holds all inputs until the call comes back, and copies of those
    that AOTAutograd overwrites (at positions `overwritten`). `gone` are inputs that nothing else
    holds.
    """
    actions = (instruction.action for instruction in program.body)
    freed = {x.slot for x in actions if isinstance(x, Free)} & {*program.arguments}
    let_go = {program.slots[slot].buffer for slot in freed}.union(gone)
    given = [trace.values[value].buffer for value in trace.inputs]
    held = [*let_go.intersection(given), *(given[position] for position in overwritten)]
    return sum(trace.buffers[buffer].nbytes for buffer in held)


def left_bytes(planned: Planned) -> int:
    """Bytes that the budget leaves while a call under `planned` waits for its backward."""
    return pause_bytes(planned.problem, planned.program)


def _first(make: Callable[[T], Planned], rooms: Iterable[T]) -> Planned:
    """The result of `make` for the first of `rooms` for which there is one.

    If there is none, raises the InfeasibleError of the last one.
    """
    *more, last = dict.fromkeys(rooms)
    for room in more:
        with contextlib.suppress(InfeasibleError):
            return make(room)
    return make(last)


def _retained_bytes(planned: Planned) -> int:
    """Bytes that a backward call under `retain_graph` needs beyond the plan's peak.

    They include its gradients, which are held while the next call makes its own, twice: autograd
    may copy what it adds to them.
    """
    problem = planned.problem
    return retained_bytes(problem, planned.program) + 2 * gradient_bytes(problem.trace)
