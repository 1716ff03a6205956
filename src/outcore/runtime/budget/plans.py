"""Plans: makes, remakes and remembers the plans of one budget's graphs, and reserves room for them.

`Planner` decides what a plan looks like. This module chooses when to call it, reserves memory in
the outer tiers, bounds the process's memory, logs, and remembers plans for recompiled graphs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch

from outcore import worker
from outcore.errors import HostMemoryError, InfeasibleError, OutcoreError, SpillError
from outcore.estimate import columns
from outcore.execute import Driver
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.identity import Identity
from outcore.ir.margin import margin_bytes
from outcore.ir.memory import extent_bytes, fits
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.totals import resident_bytes
from outcore.runtime.budget.announce import announcement
from outcore.runtime.budget.metering import Metering
from outcore.runtime.budget.ranks import naming_the_rank
from outcore.runtime.budget.registry import Registry
from outcore.runtime.budget.residency import Residency
from outcore.runtime.budget.whole_steps import LATEST
from outcore.runtime.graphs.calls import call_tensor_bytes, whole
from outcore.runtime.graphs.drift import Drift
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import alike, scaled, total_bytes, workspaces
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.profiling import MANY_SIZES, Profiling
from outcore.runtime.graphs.shown import Shown
from outcore.runtime.graphs.trial import Trial
from outcore.runtime.limits.host import available_bytes
from outcore.runtime.planning.planner import Planner
from outcore.runtime.planning.programs import copied_bytes
from outcore.runtime.planning.shares import Shares
from outcore.runtime.settings.options import Settings
from outcore.units import format_bytes, format_seconds

T = TypeVar("T")

log = logging.getLogger("outcore")

REMEMBERED_PLANS = 8
"""Plans remembered for graphs that torch may compile again; more if more graphs have lived at once.
"""


class Plans:
    """The current plans of graphs, and earlier ones for graphs that torch compiles again.

    A new plan gets its room in the outer tiers before its graph gets the plan. Methods that make a
    new plan raise InfeasibleError if no plan of the policy fits.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        driver: Driver,
        registry: Registry,
        residency: Residency,
        metering: Metering,
    ) -> None:
        self.planner = Planner(settings, driver)
        self._settings, self._driver = settings, driver
        self._on_cpu = device.type == "cpu"
        self._registry, self._residency, self._metering = registry, residency, metering
        self._remembered: OrderedDict[tuple[Identity, int], Planned] = OrderedDict()
        """(identity of the captured trace, `GraphStatus.place`) -> plan; the latest used last.
        Plans outlive their graphs, for recompiles."""

    @property
    def hardware(self) -> Hardware:
        """The machine, as plans are made for it now."""
        return self.planner.solver.hardware()

    def leave_layouts(self) -> None:
        """Make no plans with layouts any more: they do not work here."""
        self.planner.solver.places = False

    def give_known(self, graph: PlannedGraph) -> None:
        """Give a captured graph the plan of an earlier graph with the same trace and place, if any.

        Such a graph is a recompile. Also note which overrides affect the graph.
        """
        key = graph.identity, graph.status.place
        planned = self._remembered.get(key)
        if planned is not None:
            self._remembered.pop(key, None)  # another thread may have dropped it
            self._remembered[key] = planned
            graph.adopt(planned)
        self.planner.solver.captured(graph)

    def check_known(self, graph: PlannedGraph, *, checked: bool) -> None:
        """With `strict`, raise DigestError if the file of plans is known to lack the graph.

        `checked`: a step has confirmed the trace. A provisional graph may lack a plan, until it is
        planned itself.
        """
        if self._settings.strict and not graph.provisional:
            self._settings.given.check_known(graph.captured.trace, checked=checked)

    def still_fits(self, planned: Planned, graph: PlannedGraph, inputs: Sequence[Any]) -> bool:
        """Whether external memory is no more than when the plan was made, but for the margin.

        Always true if the plan keeps everything and the budget has room for the excess.
        """
        more = self._residency.base_bytes(graph, inputs) - planned.external.base_bytes
        budget = self._settings.budget_bytes
        margin = margin_bytes(budget)
        if (
            more > margin and self._residency.collect()
        ):  # garbage of compilation, as in `floor_program`
            more = self._residency.base_bytes(graph, inputs) - planned.external.base_bytes
        return more <= margin or (
            planned.everything_kept and planned.predicted.peak(Tier.DEVICE) + more <= budget
        )

    # ---- while a graph is profiled --------------------------------------------------------------

    def floor_program(
        self, graph: PlannedGraph, inputs: Sequence[Any], *, leanest: bool
    ) -> tuple[Program, int]:
        """The program for profiled steps, and the most external bytes with which it fits.

        Raises InfeasibleError if even the leanest program does not fit the budget.
        """
        collected, measured = False, graph.profiling is not None and graph.profiling.times
        known = _metered(graph) if measured else self._workspaces(graph)
        while True:
            self._bound_by_budget(graph, lacking=collected)
            own = sum(store.private_bytes for store in self._registry.stores.of(graph))
            resident = own + self._residency.external_bytes(graph, inputs)
            shares = replace(self._shares(graph), held=self._held_unplanned())
            try:
                with naming_the_rank():
                    return self.planner.programs.floor(
                        shares, resident, known, measured=measured, leanest=leanest
                    )
            except InfeasibleError:
                if collected:
                    raise
            # Garbage counts as resident memory, and compilers may have left some in this step.
            collected = self._residency.collect(again=True)

    def most_beside_timed(self, graph: PlannedGraph, profiling: Profiling) -> int:
        """The most external bytes with which the program of timed steps fits.

        Call it once workspaces are known.
        """
        workspaces = profiling.checks.workspace_bytes
        assert workspaces is not None  # noqa: S101 - as said
        shares, program = self._shares(graph), profiling.program
        return self.planner.programs.most_beside(shares, program, workspaces)

    def most_beside_all(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int | None:
        """The most external bytes with which profiled steps keep everything, if there is plenty.

        None unless there are graphs for several other sizes: hardly any size may return then, so
        this goes on for good. None if a whole step with everything kept needs more than half of the
        budget. The other half is for workspaces, of which not all are known, and for steps that
        need more. If these sizes are larger than any lately, the step is taken to grow with them.
        """
        registry, trace = self._registry, graph.captured.trace
        if not registry.keeps or registry.sizes_beside(graph) < MANY_SIZES:
            return None
        steps, half = registry.whole_steps, self._settings.budget_bytes // 2
        growth = 1.0 if graph.confirmed else self._growth(graph)
        if growth * max(1, steps.latest_bytes) > half or steps.current_bytes > half:
            return None
        step_bytes = max(steps.current_bytes, int(growth * steps.latest_bytes))
        external = self._residency.external_bytes(graph, inputs)
        own = sum(store.private_bytes for store in registry.stores.of(graph))
        held = external - self._residency.others_bytes(graph)
        shares, hardware = self._shares(graph), self.hardware
        workspace = max(self._workspaces(graph) or (), default=0)
        checked = call_tensor_bytes(trace) + copied_bytes(trace, graph.captured.overwritten)

        def needed_bytes(held_bytes: int, needed: int) -> int:
            problem = shares.problem(hardware, Profile.unknown(len(trace.ops)), held_bytes)
            return resident_bytes(problem) + needed + workspace + checked

        now = needed_bytes(own + external, whole(trace).peak_bytes)
        spare = half - max(now, needed_bytes(held, step_bytes))
        return None if spare < 0 else external + spare

    def _growth(self, graph: PlannedGraph) -> float:
        """The factor by which a buffer of `graph` exceeds that of the largest sizes called lately.

        1 if none does. inf if there are no such sizes, or if they have other buffers.
        """
        registry, trace = self._registry, graph.captured.trace
        since = registry.steps.number - LATEST
        alike = (g for g in registry.graphs if g.origin == graph.origin and g is not graph)
        lately = [g.captured.trace for g in alike if g.status.history.last_step > since]
        largest = max(lately, key=total_bytes, default=None)
        if largest is None or len(largest.buffers) != len(trace.buffers):
            return inf
        pairs = zip(trace.buffers, largest.buffers, strict=True)
        return max(1.0, *(a.nbytes / max(1, b.nbytes) for a, b in pairs))

    def kept_program(self, graph: PlannedGraph) -> Program:
        """The program that keeps everything."""
        return self.planner.programs.kept(self._shares(graph))

    def _held_unplanned(self) -> dict[Tier, int]:
        """What calls of graphs without a plan hold in the outer tiers."""
        unplanned = [g for g in self._registry.active() if g.planned is None]
        stores = [store for graph in unplanned for store in self._registry.stores.of(graph)]
        programs = [p for store in stores if (p := store.executable.program) is not None]
        return {t: sum(extent_bytes(p, t) for p in programs) for t in (Tier.HOST, Tier.DISK)}

    def lean_program(
        self,
        graph: PlannedGraph,
        planned: Planned,
        inputs: Sequence[Any],
        between_bytes: int,
        *,
        without: Collection[Tier] = (),
    ) -> Program:
        """A program of little memory for the call of `graph` that begins, beside all that waits.

        `between_bytes`: what is made while it waits; `without`: outer tiers that have no room for
        it. Raises InfeasibleError if none fits.
        """
        own = sum(store.private_bytes for store in self._registry.stores.of(graph))
        held = own + self._residency.external_bytes(graph, inputs)
        shares, lean = self._shares(graph), self.planner.programs.lean
        return lean(shares, planned, held, between_bytes, without=without)

    def _workspaces(self, graph: PlannedGraph) -> tuple[int, ...] | None:
        """The workspaces of a graph by those of the same graph at other sizes, the nearest ones.

        If none are known, those that sizes alone tell; None if there are none of those either.
        """
        trace = graph.captured.trace
        same = (g for g in self._registry.graphs if alike(g.captured.trace, trace))
        found = [(g.captured.trace, known) for g in same if (known := _metered(g)) is not None]
        if not found:
            return columns(trace) if self._on_cpu else None
        needed = total_bytes(trace)
        other, known = min(found, key=lambda pair: abs(total_bytes(pair[0]) - needed))
        return workspaces(known, other, trace, on_cpu=self._on_cpu)

    def lent(
        self,
        graph: PlannedGraph,
        inputs: Sequence[Any],
        lender: Planned,
        *,
        as_profiled: bool,
        kept: Program | None,
    ) -> tuple[Planned, int] | None:
        """The plan `lender`, that of the same graph for larger sizes, for those of `graph`.

        With the most external bytes with which its checked steps fit. None if they do not fit
        beside what is held now. `as_profiled`: calls may hold no more while they wait than if they
        were profiled without it: with `kept`, the program that keeps everything, if that is given,
        else with the floor program. Raises InfeasibleError if not even that fits then.
        """
        floor = kept if as_profiled else None
        if as_profiled and kept is None:
            floor, _ = self.floor_program(graph, inputs, leanest=False)
        others = any(each.status.kind != graph.status.kind for each in self._registry.graphs)
        keeps = as_profiled and kept is not None
        leaving = lender.left_bytes if others and not keeps else 0
        larger, trace = lender.problem.trace, graph.captured.trace
        profile = scaled(lender.problem.profile, larger, trace, on_cpu=self._on_cpu)
        make = partial(
            self.planner.lent, lender=lender, profile=profile, leaving_bytes=leaving, floor=floor
        )
        found = self._made(graph, make)
        if found is None:
            return None
        planned, spare = found
        self._bound_by_budget(graph)
        held, most = self._residency.external_bytes(graph, inputs), planned.external_bytes + spare
        if held > most:
            return None
        return self.planner.beside(planned, held), most

    def forward_only_program(
        self, graph: PlannedGraph, resident_bytes: int, profiled: Program
    ) -> tuple[Program, int]:
        """The program for calls that nobody differentiates, and the most external bytes with it.

        `profiled`: the program of the graph's profiled steps.
        """
        programs = self.planner.programs
        return programs.forward_only(
            self._shares(graph), resident_bytes, profiled, checked=not graph.confirmed
        )

    # ---- made ----------------------------------------------------------------------------------

    def first(self, graph: PlannedGraph, shown: Shown, *, as_profiled: bool = False) -> Planned:
        """The first plan of `graph`, from what its profiled steps have `shown`.

        Everything is kept if that fits.

        `as_profiled`: calls may hold no more while they wait than they did while profiled. Raises
        InfeasibleError if no plan of the policy fits the budget.
        """
        with naming_the_rank():
            lean = all(g.planned is not None for g in self._registry.outstanding(graph))
            plan = self.planner.plan
            make = partial(plan, shown=shown, lean=lean, as_profiled=as_profiled)
            planned = self._take(graph, self._made(graph, make))
        log.info("%s", self._announcement(graph, planned))
        return planned

    def take_lent(self, graph: PlannedGraph, lent: Planned, shown: Shown) -> Planned | None:
        """The plan `lent` that the profiled steps ran, with what they have `shown`.

        None if it is too large.

        Raises SpillError or HostMemoryError if the outer tiers have no room.
        """
        problem = replace(lent.problem, profile=shown.profile)
        if not fits(problem, lent.program):
            return None
        found = self.planner.simulated(lent, problem)
        planned = self._take(graph, replace(found, checking_bytes=0))
        log.info("as for larger sizes: %s", self._announcement(graph, planned))
        return planned

    def tighter(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """A new plan that uses less of the budget, after an out-of-memory error.

        Something else took device memory, or an op needed more than was measured.
        """
        make = partial(self.planner.plan_tighter, planned=planned)
        return self._again(graph, make, "with a smaller part of the budget")

    def beside_more(
        self, graph: PlannedGraph, planned: Planned, base_bytes: int, ahead_bytes: int
    ) -> Planned:
        """A new plan with room for `base_bytes` of external memory.

        It also has room for `ahead_bytes` of expected growth, if there is such a plan.
        """
        if ahead_bytes:
            with contextlib.suppress(OutcoreError):
                return self._beside_more(graph, planned, base_bytes + ahead_bytes)
        return self._beside_more(graph, planned, base_bytes)

    def _beside_more(self, graph: PlannedGraph, planned: Planned, base_bytes: int) -> Planned:
        make = partial(self.planner.plan_beside_more, planned=planned, base_bytes=base_bytes)
        more = format_bytes(base_bytes - planned.external.base_bytes)
        return self._again(graph, make, f"with {more} more held by the process")

    def for_calls(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """A new plan for the calls that are expected to be outstanding at once."""
        make = partial(self.planner.plan_for_calls, planned=planned)
        expected = graph.status.at_once.expected
        return self._again(graph, make, f"for {expected} outstanding calls at once")

    def beside_calls(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """A new plan with room for what outstanding calls of other graphs may hold by now."""
        make = partial(self.planner.plan_beside_calls, planned=planned)
        return self._again(graph, make, "with more room for calls of other graphs")

    def leaving_more(self, graph: PlannedGraph, planned: Planned, more_bytes: int) -> Planned:
        """A new plan that leaves `more_bytes` more to later graphs while this one waits."""
        make = partial(self.planner.plan_leaving, planned=planned, more_bytes=more_bytes)
        more = f"with {format_bytes(more_bytes)} more left for other graphs"
        return self._again(graph, make, more)

    def lacking_bytes(self, graph: PlannedGraph, planned: Planned) -> int:
        """External bytes, those of other graphs' calls included, that `planned` has no room for.

        Negative if there is room to spare.
        """
        return self.planner.lacking_bytes(self._shares(graph), planned)

    def after(self, graph: PlannedGraph, trial: Trial) -> Planned:
        """A plan for `graph` from what a trial of its plan measured; the old plan if it is best.

        The old plan also stays if the outer tiers have no room for the better one.
        """
        planned, problem, drift = trial.planned, trial.problem(), trial.drift
        make = partial(self.planner.plan_again, planned=planned, problem=problem, drift=drift)
        plans = self._made(graph, make)
        for better in plans[:-1]:
            with contextlib.suppress(SpillError, HostMemoryError):
                return _tell(drift, self._take(graph, better))
        return _tell(drift, self._take(graph, plans[-1]))

    def _made(self, graph: PlannedGraph, make: Callable[[Shares], T]) -> T:
        """The result of `make` for the graph's shares; its time counts even if it fails."""
        start = time.perf_counter()
        try:
            return make(self._shares(graph))
        finally:
            graph.status.planning_seconds += time.perf_counter() - start

    def _again(self, graph: PlannedGraph, make: Callable[[Shares], Planned], how: str) -> Planned:
        """Plan `graph` once more by `make`, keep that plan, and log it."""
        with naming_the_rank():
            planned = self._take(graph, self._made(graph, make))
        log.info("planned again %s. %s", how, self._announcement(graph, planned))
        return planned

    def _shares(self, graph: PlannedGraph) -> Shares:
        return self.planner.shares(graph, self._registry.running_with(graph))

    def _announcement(self, graph: PlannedGraph, planned: Planned) -> str:
        number, rules = self._registry.number(graph), self._settings.given.rules
        return announcement(planned, self._settings.policy, number, overridden=bool(rules))

    # ---- room for them --------------------------------------------------------------------------

    def _take(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """Reserve a plan's room in the outer tiers, and remember the plan."""
        planned = replace(planned, planning_seconds=graph.status.planning_seconds)
        if self._on_cpu and available_bytes() < self._settings.budget_bytes:
            worker.dismiss()  # the planning worker waits, and the step may need its memory
        self.bound_memory({graph: planned})  # first: pinning host memory uses device memory
        try:
            self._reserve(graph, planned)
        except OutcoreError:
            self.bound_memory()  # the previous plans stay in force
            raise
        self._remember((graph.identity, graph.status.place), planned)
        return planned

    def _reserve(self, graph: PlannedGraph, planned: Planned) -> None:
        """Reserve room for `planned` in the outer tiers. Raises SpillError or HostMemoryError.

        Sizes that take turns use the same host memory. So as much of it is kept as the most that
        one of them needs, if that is possible. It may not have come for long.
        """
        nbytes = {tier: planned.predicted.peak(tier) for tier in (Tier.HOST, Tier.DISK)}
        others = [g for g in self._registry.graphs if g is not graph]
        held = {g: g.planned.predicted.peak(Tier.HOST) for g in others if g.planned}
        if not nbytes[Tier.HOST] and any(map(held.get, self._registry.active())):
            del nbytes[Tier.HOST]  # the reserved host memory of other plans stays
        kind, waiting = graph.status.kind, self._registry.waiting
        turns = [n for g, n in held.items() if g.status.kind == kind and not waiting(g)]
        most = max(turns, default=0)
        if most > nbytes.get(Tier.HOST, most):
            with contextlib.suppress(OutcoreError):
                return self._driver.reserve(nbytes | {Tier.HOST: most})
        return self._driver.reserve(nbytes)

    def _remember(self, key: tuple[Identity, int], planned: Planned) -> None:
        self._metering.forget_peak()
        self._remembered.pop(key, None)
        self._remembered[key] = planned
        while len(self._remembered) > max(REMEMBERED_PLANS, self._registry.most_graphs):
            self._remembered.popitem(last=False)

    def _bound_by_budget(self, graph: PlannedGraph, *, lacking: bool = False) -> None:
        """Bound the process's memory for a graph without a plan; `lacking`: there was too little.

        If it was called with other sizes before, these ones may never return.
        """
        budget, recurs = self._settings.budget_bytes, not self._registry.sizes_beside(graph)
        self._driver.bound_memory(
            self._residency.resident_bytes, budget, for_good=recurs or lacking
        )

    def bound_memory(self, latest: dict[PlannedGraph, Planned] | None = None) -> None:
        """Bound the process's memory if the plan of a running graph moves anything.

        The bound is the highest peak of the plans; the budget if a running graph has no plan.
        `latest`: plans that graphs are about to get.
        """
        latest = latest or {}
        active = {g: g.planned for g in self._registry.active()} | latest
        bound: int | None = None
        if not all(p is None or p.everything_kept for p in active.values()):
            came = {g: g.status.growth.unplanned_bytes for g in active if g not in latest}
            known = [p.peak_bytes + came.get(g, 0) for g, p in active.items() if p]
            bound = max(known) if len(known) == len(active) else self._settings.budget_bytes
        self._driver.bound_memory(self._residency.resident_bytes, bound)


def _metered(graph: PlannedGraph) -> Sequence[int] | None:
    """The workspaces of the ops of a graph; None if they are not known yet."""
    if graph.planned is not None:
        return graph.planned.problem.profile.workspace_bytes
    return None if graph.profiling is None else graph.profiling.checks.workspace_bytes


def _tell(drift: Drift, planned: Planned) -> Planned:
    what = "another plan" if planned.replanned and planned.replanned.changed else "the same plan"
    now = format_seconds(planned.predicted.seconds)
    log.info("%s: planned again with measured times: %s, predicted %s", drift, what, now)
    return planned
