"""planner: make the plan of one graph, with room for the other calls and graphs of the step.

A graph is planned alone (decision 0004). What the rest of the step holds enters its `Problem` as
two numbers: `outside_bytes`, memory held outside the graph throughout, and `between_bytes`, memory
that the rest of the step needs between the graph's two calls. Most methods here choose these
numbers, and let `Fitting` make the plan.

"External" memory is what the process holds that is not the graph's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from outcore.errors import InfeasibleError
from outcore.execute import Driver
from outcore.gc_paused import gc_paused
from outcore.ir.family import family_of
from outcore.ir.hardware import Tier
from outcore.ir.margin import margin_bytes
from outcore.ir.memory import fits, pause_bytes, peak
from outcore.ir.plan import KEEP_ALL, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.store import digest
from outcore.lower import lower, resized
from outcore.runtime.graphs.calls import Calls, call_tensor_bytes
from outcore.runtime.graphs.drift import Drift, Replanned
from outcore.runtime.graphs.external import ExternalMemory, Room
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.shown import Shown
from outcore.runtime.planning.fitting import Fitting, first
from outcore.runtime.planning.programs import Programs, checked_bytes
from outcore.runtime.planning.shares import Shares
from outcore.runtime.planning.solving import Solver
from outcore.runtime.settings.options import Settings
from outcore.simulate import simulate

TIGHTER_DIVISOR = 10
"""After an out-of-memory error the graph is planned again with the budget divided by this left
free."""


class Planner:
    """Plans the graphs of one budget, each with room for the others and for its own other calls."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.solver = Solver(settings, driver)
        self.programs = Programs(self.solver)
        self._fitting = Fitting(self.solver)
        self._known: WeakKeyDictionary[PlannedGraph, Calls] = WeakKeyDictionary()

    def shares(self, graph: PlannedGraph, active: Sequence[PlannedGraph]) -> Shares:
        """The part of the budget for `graph`, which is one of the `active` graphs."""
        solver = self.solver
        state_bytes = solver.driver.generator.get_state().nbytes
        budget, at_least = solver.settings.budget_bytes, graph.status.left_at_least
        return Shares(graph, active, budget, state_bytes, self._known, at_least)

    @gc_paused()
    def plan(self, shares: Shares, shown: Shown, *, lean: bool, as_profiled: bool) -> Planned:
        """The first plan of a graph, from what profiled steps have `shown`.

        Everything is kept if that fits.

        `lean`: graphs without a plan may be left the least that they need, as none of them waits.
        `as_profiled`: calls may hold no more while they wait than they did while profiled.

        Raises InfeasibleError if no plan of the policy fits the budget. If other graphs have no
        plan yet, or alternate with this one within a step, or if backward calls keep what they need
        (`retain_graph`), the budget that the error names is only a lower bound.
        """
        external = shares.external(shown)
        hardware = self.solver.hardware()
        rooms = [*shares.rooms(hardware, external)]
        if lean:
            rooms += replace(shares, unplanned_lean=True).rooms(hardware, external)[-1:]
        try:
            make = partial(self._beside, shares, shown, external, as_profiled=as_profiled)
            return first(make, rooms)
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
        shown: Shown,
        external: ExternalMemory,
        room: Room,
        *,
        as_profiled: bool,
    ) -> Planned:
        """The plan with `room` for external memory. Raises InfeasibleError as `plan` does."""
        hardware, profile = self.solver.hardware(), shown.profile
        between = max(
            external.between_bytes,
            shares.in_turn_bytes(hardware, external, room),
            shares.paused_bytes(hardware, external, room),
        )
        problem = shares.problem(hardware, profile, room.nbytes, between)
        more = max(0, pause_bytes(problem, shown.program) - between) if as_profiled else 0
        problem = replace(problem, between_bytes=between + more)
        retained = shares.graph.status.retained
        try:
            planned = self._fitting.plan(shares, problem, external, room, in_haste=retained)
        except InfeasibleError as error:
            error.at_least |= retained
            raise
        if retained:
            planned = self._fitting.retaining(shares, planned)
        if more:  # that much is left free, but nothing needs it yet
            between = planned.problem.between_bytes - more
            planned = self._fitting.needing(shares, planned, between)
        taken = Calls(problem, 1, others=True).taken(shown.program)
        return replace(planned, profiled=taken, early=shown.early, bounded=as_profiled)

    @gc_paused()
    def lent(
        self,
        shares: Shares,
        lender: Planned,
        profile: Profile,
        leaving_bytes: int,
        floor: Program | None,
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
        trace = captured.trace
        problem = shares.with_outer_budgets(replace(lender.problem, trace=trace, profile=profile))
        between = max(problem.between_bytes, leaving_bytes)
        pause = 0 if floor is None else pause_bytes(problem, floor)
        least = solver.settings.rooms[0]
        room = lender.room_bytes if lender.layout is None else least
        waiting = replace(problem, between_bytes=max(between, pause))
        for plan, left, program in self._lent(waiting, lender, room):
            less = replace(problem, budget_bytes=problem.budget_bytes - left, between_bytes=between)
            if pause_bytes(problem, program) < pause:
                continue
            held = checked_bytes(trace, program, lender.external.gone, captured.overwritten)
            spare = less.budget_bytes - peak(less, program, Tier.DEVICE).nbytes - held
            if spare >= 0 and fits(less, program):
                lent = replace(
                    self.simulated(replace(lender, program=program), problem),
                    plan=plan,
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

    def _lent(
        self, problem: Problem, lender: Planned, room: int
    ) -> Iterator[tuple[Plan, int, Program]]:
        """Programs by which to run the plan `lender` for `problem`, and how much room they leave.

        The first one keeps everything. If traces for further sizes are told by a pattern, hardly
        any size may return: then programs for larger sizes come next, as they are.
        """
        yield KEEP_ALL, 0, replace(self.solver.kept(problem), plan_digest=digest(KEEP_ALL))
        plan, family = lender.plan, family_of(problem.trace)
        if not plan.choices and not plan.variants:
            return
        if family is not None:
            family.lend(lender.program)
            unnamed = replace(plan, problem_digest="", trace_digest="")
            lent = [each.program for each in family.lent]
            alike = (p for p in reversed(lent) if p.plan_digest == lender.program.plan_digest)
            for larger in (lender.program, *alike):
                program = resized(larger, problem)
                if program is not None:
                    yield unnamed, room, program
        less = replace(problem, budget_bytes=problem.budget_bytes - room)
        anew = lower(less, plan := _for(problem, plan), fast=True)
        if family is not None:
            family.lend(anew)
        yield plan, room, anew

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
            self.simulated(planned, problem),
            external=replace(external, base_bytes=external.base_bytes + more),
            external_bytes=external_bytes,
        )

    def simulated(self, planned: Planned, problem: Problem) -> Planned:
        """The same program of a lent plan for `problem`, with what is predicted of it there."""
        program, kept = planned.program, self.solver.kept(problem)
        predicted = simulate(problem, program)
        same = program.body is kept.body and program.slots == kept.slots
        in_core = predicted if same else simulate(problem, kept)
        return replace(planned, problem=problem, predicted=predicted, in_core=in_core)

    @gc_paused()
    def plan_for_calls(self, shares: Shares, planned: Planned) -> Planned:
        """A new plan for the calls expected at once. Raises InfeasibleError as `plan` does."""
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
        at_least = max(shares.left_at_least, planned.left_bytes + more_bytes)
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

    def _as_before(
        self, shares: Shares, planned: Planned, problem: Problem, *, needs_room: bool = False
    ) -> Planned:
        """A plan for `problem`, which is that of `planned` with other times or less memory.

        It has room for what `retain_graph` keeps if `planned` has. `needs_room`: it must have room
        for what calls of other graphs hold by now. Otherwise, if there is no such plan, they get
        the room that they had under `planned`. Raises as `Fitting.plan` does.
        """
        rooms = [*shares.rooms(self.solver.hardware(), planned.external)]
        if not needs_room and planned.external_bytes < rooms[-1].nbytes:
            rooms.append(Room(planned.external_bytes))
        return first(partial(self._again_beside, shares, planned, problem), rooms)

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
        alone = shares.with_outer_budgets(
            replace(problem, outside_bytes=problem.outside_bytes + more)
        )
        hardware = self.solver.hardware()
        between = [
            shares.paused_bytes(hardware, planned.external, room),
            shares.in_turn_bytes(hardware, planned.external, room),
        ]
        if shares.later:  # they have plans, and this graph may hold more than they found
            between += shares.left_bytes(alone, planned.external)[-1:]
        alone = replace(alone, between_bytes=max(alone.between_bytes, *between))
        retained = planned.retaining_bytes is not None
        again = self._fitting.plan(shares, alone, planned.external, room, in_haste=retained)
        if retained:
            again = self._fitting.retaining(shares, again)
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
        alone = replace(problem, outside_bytes=problem.outside_bytes - planned.others_bytes)
        stays = replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=self._fitting.in_core(shares, alone, calls, planned.plan),
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
        try:
            return self._as_before(shares, planned, problem)
        except InfeasibleError:
            return None


def _for(problem: Problem, plan: Plan) -> Plan:
    """The same plan for the trace of `problem`, which has the gaps of that it was made for."""
    digests = digest(problem), digest(problem.trace)
    return make_plan(plan.by_gap, plan.policy, *digests, plan.by_op)
