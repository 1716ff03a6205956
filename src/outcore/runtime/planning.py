"""planning: from a graph and its profile to a program, within shares of one budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outcore.apart import plan_apart
from outcore.errors import InfeasibleError, SpillError
from outcore.execute import Driver
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.memory import crossing_bytes, fits, peak, retained_bytes
from outcore.ir.plan import Choice, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Effect, Trace
from outcore.lower import lower
from outcore.planfile import Overridden, Rule, check_rules, forced, has_effect
from outcore.policies import Policy, floor_plan, overflow, staging_needed, with_roomy_host
from outcore.runtime.drift import Drift, Replanned
from outcore.runtime.options import Settings
from outcore.runtime.profiling import Profiling
from outcore.runtime.reuse import reused
from outcore.simulate import simulate

if TYPE_CHECKING:  # graphs are planned through here
    from outcore.runtime.graph import PlannedGraph

MARGIN_DIVISOR = 200
"""The safety margin is the budget over this: half a percent."""

TIGHTER_DIVISOR = 10
"""A plan that ran out of device memory is made again with the budget over this left free."""

FORCED = "overrides"
"""Who made a plan in which only what overrides say is moved: no policy was asked."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem, its plan, the program, and what the simulator says of it."""

    problem: Problem
    plan: Plan
    program: Program
    predicted: Timeline
    in_core: Timeline
    planning_seconds: float
    resident_bytes: int
    """The most that was held besides the graph's own buffers when a profiled step began."""
    replanned: Replanned | None = None
    """Why the graph was planned again with other times, if it was."""
    from_file: str = ""
    """The file of plans that it comes from; such a plan is not improved on."""
    note: str = ""
    """For the report."""
    retains: bool = False
    """Whether there is room for backward calls that leave all as it was for the next one."""

    @property
    def everything_kept(self) -> bool:
        """Whether the plan moves nothing."""
        return not self.plan.moves

    @property
    def fits_in_core(self) -> bool:
        """Whether there was no need to move anything: a file or overrides say so."""
        return self.in_core.peak(Tier.DEVICE) <= self.problem.limit_bytes(Tier.DEVICE)

    @property
    def may_improve(self) -> bool:
        """Whether to plan again where times turn out otherwise: once, if there is a choice."""
        return self.replanned is None and not self.everything_kept and not self.from_file


class Planner:
    """What plans the graphs of one budget: its shares, the machine, the policy."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.settings, self.driver = settings, driver
        self._hardware: Hardware | None = None
        self._rules: WeakKeyDictionary[PlannedGraph, frozenset[Rule]] = WeakKeyDictionary()
        """The overrides that have an effect on each graph."""
        self._effective: set[Rule] = set()
        """Those that ever had one: their graph may be idle by now, or gone."""

    def captured(self, graph: PlannedGraph) -> None:
        """Remember which overrides have an effect on `graph`: on others they need have none."""
        rules, trace = self.settings.given.rules, graph.captured.trace
        self._rules[graph] = frozenset(rule for rule in rules if has_effect(rule, [trace]))
        self._effective |= self._rules[graph]

    def hardware(self) -> Hardware:
        """This machine, with its links as measured (once)."""
        if self._hardware is None:
            self._hardware = self.driver.hardware(self._budgets)
        return self._hardware

    @property
    def _budgets(self) -> dict[Tier, int]:
        settings = self.settings
        return {
            Tier.DEVICE: settings.budget_bytes,
            Tier.HOST: settings.host_budget_bytes,
            Tier.DISK: settings.disk_budget_bytes,
        }

    def problem(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        profile: Profile,
        resident_bytes: int,
        between_bytes: int = 0,
    ) -> Problem:
        """The problem of `graph`, with `resident_bytes` held besides its own buffers.

        `active` are the graphs that run, `graph` among them.

        Graphs of one step nest: forwards in order, backwards in reverse. What the earlier ones hold
        is resident; the later ones are left a share in proportion to what they would keep, and no
        more than they can use. Calls of one graph that wait for their backward at once get equal
        shares.
        """
        trace, hardware = graph.captured.trace, self.hardware()
        budget = self.settings.budget_bytes
        later = [g for g in active if graph in g.before]
        gradients = sum(_gradient_bytes(g) for g in later)
        states = _state_bytes(trace, self.driver.generator.get_state().nbytes)
        margin = budget // MARGIN_DIVISOR
        outside = resident_bytes + gradients + states + margin
        arguments = _argument_bytes(trace)
        free = max(0, budget - outside - arguments)
        outside += free - free // graph.most_outstanding

        def share(tier: Tier) -> int:
            return self._outer_share(graph, active, tier, hardware.capacity(tier))

        problem = Problem(
            trace,
            profile,
            hardware,
            budget,
            host_budget_bytes=share(Tier.HOST),
            disk_budget_bytes=share(Tier.DISK),
            outside_bytes=outside,
            between_bytes=between_bytes,
        )
        if not later:
            return problem
        mine, theirs = kept_bytes(graph), sum(kept_bytes(g) for g in later)
        free = max(0, budget - outside - arguments)
        for_them = free * theirs // max(1, mine + theirs)
        used = [self._most_bytes(g) for g in later]
        if None not in used:
            for_them = min(for_them, between_bytes + sum(filter(None, used)))
        return replace(problem, between_bytes=max(between_bytes, for_them))

    def _most_bytes(self, graph: PlannedGraph) -> int | None:
        """What `graph` adds at most to what is held already; None before it is profiled."""
        if (planned := graph.planned) is not None:
            problem, nbytes = planned.problem, planned.in_core.peak(Tier.DEVICE)
        elif graph.profiling is not None and graph.profiling.done:
            trace, profile = graph.captured.trace, graph.profiling.profile()
            problem = Problem(trace, profile, self.hardware(), self.settings.budget_bytes)
            nbytes = peak(problem, lower(problem, make_plan({}, "keep-all")), Tier.DEVICE).nbytes
        else:
            return None
        held = problem.outside_bytes + _argument_bytes(problem.trace)
        return graph.most_outstanding * (nbytes - held)

    def floor_program(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], resident_bytes: int
    ) -> Program:
        """The program of the profiled steps: nothing overlaps, least memory.

        Raises InfeasibleError where even that does not fit the budget.
        """
        ops = len(graph.captured.trace.ops)
        profile = Profile((0.0,) * ops, (0,) * ops, Source.ESTIMATED)
        problem = self.problem(graph, active, profile, resident_bytes)
        problem, plan = self._solve(graph, active, problem, floor_plan)
        return lower(replace(problem, budget_bytes=1), plan)

    def plan(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], profiled: Profiling
    ) -> Planned:
        """Plan `graph` from what was measured. Everything is kept where that fits.

        Raises InfeasibleError where no plan of the policy fits the budget.
        """
        resident = profiled.resident_bytes + profiled.lingering_bytes
        profile, between = profiled.profile(), profiled.between_bytes
        problem = self.problem(graph, active, profile, resident, between)
        planned = self._planned(graph, active, problem, profiled.resident_bytes)
        return self._retaining(graph, active, planned) if graph.standing.retained else planned

    def _retaining(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], planned: Planned
    ) -> Planned:
        """The same with room for all that crosses until backward ends: `retain_graph` asks for it.

        And for the gradients of one backward call beside those of the next, twice: autograd may
        copy what it adds to them. Raises InfeasibleError where no plan has that.
        """
        room, problem, gradients = 0, planned.problem, 2 * _gradient_bytes(graph)
        while (more := retained_bytes(planned.problem, planned.program) + gradients) > room:
            room = more
            wider = replace(problem, outside_bytes=problem.outside_bytes + room)
            planned = self._planned(graph, active, wider, planned.resident_bytes)
        return replace(planned, retains=True)

    def plan_tighter(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], planned: Planned
    ) -> Planned:
        """The same with less of the budget. Raises InfeasibleError where no plan fits."""
        problem, tighter = planned.problem, planned.problem.budget_bytes // TIGHTER_DIVISOR
        problem = replace(problem, outside_bytes=problem.outside_bytes + tighter)
        again = self._planned(graph, active, problem, planned.resident_bytes)
        return replace(again, replanned=planned.replanned)

    def plan_again(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        planned: Planned,
        problem: Problem,
        drift: Drift,
    ) -> tuple[Planned, ...]:
        """Plans for `problem`, which is that of `planned` with other times, the best first.

        The last one is always that of `planned`, as `problem` sees it; another comes before it
        where it is predicted to be faster. What other graphs hold by now is left to them.
        """
        start = time.perf_counter()
        kept = lower(problem, make_plan({}, "keep-all"))
        stays = replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=simulate(problem, kept),
            replanned=Replanned(drift, changed=False),
        )
        other = self._other(graph, active, problem, planned.resident_bytes)
        seconds = planned.planning_seconds + time.perf_counter() - start
        stays = replace(stays, planning_seconds=seconds)
        if other is None or other.predicted.seconds >= stays.predicted.seconds:
            return (stays,)
        again = Replanned(drift, changed=True)
        return replace(other, planning_seconds=seconds, replanned=again), stays

    def _other(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        problem: Problem,
        resident_bytes: int,
    ) -> Planned | None:
        """What the policy makes of `problem`; None where it has no plan within what is left."""
        capacity = problem.hardware.capacity
        host, disk = (
            self._outer_share(graph, active, tier, capacity(tier))
            for tier in (Tier.HOST, Tier.DISK)
        )
        problem = replace(problem, host_budget_bytes=host, disk_budget_bytes=disk)
        try:
            return self._planned(graph, active, problem, resident_bytes)
        except InfeasibleError:
            return None

    def _planned(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        problem: Problem,
        resident_bytes: int,
    ) -> Planned:
        start = time.perf_counter()
        in_core = lower(problem, make_plan({}, "keep-all"))
        in_core_timeline = simulate(problem, in_core)
        given = self.settings.given
        unseen = [rule for rule in given.rules if rule not in self._effective]
        check_rules(unseen, [g.captured.trace for g in active])
        fixed = forced(problem, given.rules)
        earlier = [g.captured.trace for g in active[: active.index(graph)]]
        saved = given.find(problem, strict=self.settings.strict, earlier=earlier)
        if saved is not None:
            problem = self._with_tiers(graph, active, problem, saved.plan())
            plan = reused(problem, saved, fixed, given.path)
        else:
            problem, plan = self._made(graph, active, problem, in_core, fixed)
        program = lower(problem, plan)
        return Planned(
            problem,
            plan,
            program,
            simulate(problem, program),
            in_core_timeline,
            time.perf_counter() - start,
            resident_bytes,
            from_file="" if saved is None else given.path,
            note="; ".join(filter(None, (given.note(saved), self._idle_rules(active)))),
        )

    def _idle_rules(self, active: Sequence[PlannedGraph]) -> str:
        """Which overrides are for none of the graphs that run now; empty where all are."""
        found = frozenset().union(*(self._rules[g] for g in active))
        idle = [rule for rule in self.settings.given.rules if rule not in found]
        listed = ", ".join(f'"{rule.match}: {rule.action}"' for rule in idle)
        return f"overrides for no graph that ran when it was planned: {listed}" * bool(idle)

    def _made(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        problem: Problem,
        in_core: Program,
        fixed: Mapping[Gap, Choice],
    ) -> tuple[Problem, Plan]:
        """The policy's plan, but for what is `fixed`; everything else is kept where that fits."""
        if fits(problem, in_core):
            kept = make_plan(dict(fixed), FORCED)
            kept = kept if kept.moves else replace(kept, policy="keep-all")
            if not fixed or fits(problem, lower(problem, kept)):
                return problem, kept
        policy: Policy = self.settings.policy
        if fixed:
            policy = Overridden(policy, self.settings.given.rules)
        return self._solve(graph, active, problem, partial(plan_apart, policy))

    def _with_tiers(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], problem: Problem, plan: Plan
    ) -> Problem:
        """The problem with a disk beyond the host, where `plan` uses one and there is one."""
        used = {c.tier for _, c in plan.choices if isinstance(c, Offload)}
        if Tier.DISK not in used or problem.hardware.capacity(Tier.DISK):
            return problem
        room = self._outer_share(graph, active, Tier.DISK, self.settings.disk_budget_bytes)
        hardware = self._with_disk(problem.hardware) or problem.hardware
        return replace(problem, hardware=hardware, disk_budget_bytes=room)

    def _solve(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        problem: Problem,
        make: Callable[[Problem], Plan],
    ) -> tuple[Problem, Plan]:
        """The plan of `make`; if need be, with a disk beyond the host.

        Raises InfeasibleError as `make` does, with the budget of which enough is left.
        """
        try:
            return self._solve_somewhere(graph, active, problem, make)
        except InfeasibleError as error:
            if error.tier == Tier.DEVICE.value:
                error.floor_bytes = self._budget_with(graph, problem, error.floor_bytes)
            raise

    def _budget_with(self, graph: PlannedGraph, problem: Problem, floor_bytes: int) -> int:
        """The budget that has what `floor_bytes` would leave to the graph, were nothing to grow.

        The margin is a part of it, and calls that wait at once share what is free.
        """
        calls, outside = graph.most_outstanding, problem.outside_bytes
        margin = problem.budget_bytes // MARGIN_DIVISOR
        arguments = _argument_bytes(problem.trace)
        shared = calls * max(0, problem.budget_bytes - outside - arguments)
        fixed = problem.budget_bytes - arguments - shared if shared else outside
        wanted = calls * max(0, floor_bytes - outside - arguments)
        whole = fixed - margin + arguments + wanted
        return -(-whole * MARGIN_DIVISOR // (MARGIN_DIVISOR - 1))

    def _solve_somewhere(
        self,
        graph: PlannedGraph,
        active: Sequence[PlannedGraph],
        problem: Problem,
        make: Callable[[Problem], Plan],
    ) -> tuple[Problem, Plan]:
        try:
            return problem, make(problem)
        except InfeasibleError as error:
            if not problem.hardware.capacity(Tier.HOST):
                raise
            room = self._outer_share(graph, active, Tier.DISK, self.settings.disk_budget_bytes)
            wider = replace(problem, disk_budget_bytes=room)
            try:
                plan = make(with_roomy_host(wider))
                hardware = self._with_disk(problem.hardware)
            except InfeasibleError:
                if not self.settings.disk_budget_bytes:
                    folder = self.settings.spill_dir
                    error.add_note(f"outcore: the disk cannot help: {folder} is missing or full")
                raise error from None
            except SpillError as unusable:
                error.add_note(f"outcore: the disk cannot help: {unusable}")
                raise error from None
            if hardware is None:
                raise
        wider = replace(wider, hardware=hardware)
        return wider, overflow(wider, plan)

    def _with_disk(self, hardware: Hardware) -> Hardware | None:
        """`hardware` with a disk beyond the host (measured once); None where there is none."""
        if hardware.capacity(Tier.DISK):
            return hardware
        known = self.hardware()
        if not known.capacity(Tier.DISK):
            wider = self.driver.wider_hardware(self._budgets)
            if wider is None:
                return None
            self._hardware = known = wider
        links = {(a, b): link for a, b, link in (*known.links, *hardware.links)}
        return replace(known, links=tuple((a, b, link) for (a, b), link in links.items()))

    def _outer_share(
        self, graph: PlannedGraph, active: Sequence[PlannedGraph], tier: Tier, room: int
    ) -> int:
        """Bytes of the `room` in a tier that other graphs' plans leave, for a call of `graph`."""
        others = [(g.planned, g.most_outstanding) for g in active if g is not graph]
        plans = [(planned, calls) for planned, calls in others if planned is not None]
        taken = sum(p.predicted.peak(tier) * calls for p, calls in plans)
        if tier is Tier.HOST:
            taken += max((staging_needed(p.problem.trace, p.plan) for p, _ in plans), default=0)
        return max(0, room - taken) // graph.most_outstanding


def kept_bytes(graph: PlannedGraph) -> int:
    """Device bytes that a graph holds between its calls: as planned, else with everything kept."""
    if graph.planned is not None:
        return crossing_bytes(graph.planned.program)
    trace = graph.captured.trace
    made = {b for op in range(trace.boundary) for b in trace.writes[op]}
    used = {b for op in range(trace.boundary, len(trace.ops)) for b in trace.reads[op]}
    return sum(trace.buffers[b].nbytes for b in made & used)


def _argument_bytes(trace: Trace) -> int:
    """Bytes of the caller's tensors that stay where they are: parameters, as a rule."""
    return sum(b.nbytes for b in trace.buffers if b.pinned)


def _state_bytes(trace: Trace, state_bytes: int) -> int:
    """Bytes of generator states that a program may keep: one per random forward op, for its rerun.

    And during a rerun the present one, to go on from.
    """
    draws = sum(Effect.RANDOM in op.effects for op in trace.ops[: trace.boundary])
    return (draws + bool(draws)) * state_bytes


def _gradient_bytes(graph: PlannedGraph) -> int:
    trace = graph.captured.trace
    return sum(trace.buffers[b].nbytes for b in trace.value_buffers(trace.gradients))
