"""Plans: those of one budget's graphs: made, made again, made room for, and remembered."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from outcore import worker
from outcore.errors import HostMemoryError, InfeasibleError, OutcoreError, SpillError
from outcore.execute import Driver
from outcore.ir.hardware import Tier
from outcore.ir.program import Program
from outcore.runtime.announce import announcement
from outcore.runtime.drift import Drift
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.margin import margin_bytes
from outcore.runtime.metering import Metering
from outcore.runtime.options import Settings
from outcore.runtime.planned import Planned
from outcore.runtime.planning import Planner
from outcore.runtime.profiling import Profiling
from outcore.runtime.ranks import naming_the_rank
from outcore.runtime.registry import Registry
from outcore.runtime.residency import Residency
from outcore.runtime.shares import Shares
from outcore.runtime.trial import Trial
from outcore.units import format_bytes, format_seconds

T = TypeVar("T")

log = logging.getLogger("outcore")

REMEMBERED_PLANS = 8
"""Plans kept for graphs that torch may compile again, where fewer graphs than that are live."""


class Plans:
    """The plans that graphs run, and those that they ran, for what torch compiles again.

    Each that is made gets its room in the outer tiers before a graph is given it.
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
        self._settings, self._device, self._driver = settings, device, driver
        self._registry, self._residency, self._metering = registry, residency, metering
        self._remembered: OrderedDict[tuple[str, int], Planned] = OrderedDict()
        """Digest of a captured trace, and how many like it wait when it is called -> its plan, the
        latest last; outlives graphs, for recompiles."""

    def give_known(self, graph: PlannedGraph) -> None:
        """Give a captured graph the plan that one of its trace and place had, if any (a recompile).

        And remember which overrides concern it.
        """
        key = graph.digest, graph.status.place
        planned = self._remembered.get(key)
        if planned is not None:
            self._remembered.move_to_end(key)
            graph.adopt(planned)
        self.planner.solver.captured(graph)

    def check_known(self, graph: PlannedGraph, *, checked: bool) -> None:
        """Raise DigestError with `strict` where the file of plans is known to have none for it.

        `checked`: the trace has been held against a step.
        """
        if self._settings.strict:
            self._settings.given.check_known(graph.captured.trace, checked=checked)

    def still_fits(self, planned: Planned, graph: PlannedGraph, inputs: Sequence[Any]) -> bool:
        """Whether no more is held besides `graph` than when its plan was made, but for the margin.

        Always so where everything is kept and the budget has room for what came on top.
        """
        more = self._residency.base_bytes(graph, inputs) - planned.external.base_bytes
        budget = self._settings.budget_bytes
        margin = margin_bytes(budget)
        if (
            more > margin and self._residency.collect()
        ):  # what compilation left, as in `floor_program`
            more = self._residency.base_bytes(graph, inputs) - planned.external.base_bytes
        return more <= margin or (
            planned.everything_kept and planned.predicted.peak(Tier.DEVICE) + more <= budget
        )

    # ---- while a graph is profiled --------------------------------------------------------------

    def floor_program(
        self, graph: PlannedGraph, inputs: Sequence[Any], *, leanest: bool
    ) -> tuple[Program, int]:
        """The program of the profiled steps, and how much may be held besides while it fits.

        Raises InfeasibleError where even the leanest does not fit the budget.
        """
        collected = False
        while True:
            budget = self._settings.budget_bytes
            self._driver.bound_memory(self._residency.resident_bytes(), budget)
            resident, shares = self._residency.external_bytes(graph, inputs), self._shares(graph)
            try:
                with naming_the_rank():
                    return self.planner.floor_program(shares, resident, leanest=leanest)
            except InfeasibleError:
                if collected:
                    raise
            # What is no one's any more counts as resident: captures in this step may have left it.
            collected = self._residency.collect(again=True)

    def still_program(self, graph: PlannedGraph, resident_bytes: int) -> tuple[Program, int]:
        """The program that moves least, and how much may be held besides while it fits."""
        return self.planner.still_program(self._shares(graph), resident_bytes)

    # ---- made ----------------------------------------------------------------------------------

    def first(self, graph: PlannedGraph, profiled: Profiling) -> Planned:
        """Plan `graph` from what was measured. Everything is kept where that fits.

        Raises InfeasibleError where no plan of the policy fits the budget.
        """
        with naming_the_rank():
            lean = all(g.planned is not None for g in self._registry.outstanding(graph))
            make = partial(self.planner.plan, profiled=profiled, lean=lean)
            planned = self._take(graph, self._made(graph, make))
        log.info("%s", self._announcement(graph, planned))
        return planned

    def tighter(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """The same with less: something else took device memory, or an op more than measured.

        Raises InfeasibleError where no plan of the policy fits.
        """
        make = partial(self.planner.plan_tighter, planned=planned)
        return self._again(graph, make, "with less of the budget")

    def beside_more(
        self, graph: PlannedGraph, planned: Planned, base_bytes: int, ahead_bytes: int
    ) -> Planned:
        """The same with `base_bytes` held besides, and what is ahead if there is room for that.

        Raises InfeasibleError where no plan of the policy fits.
        """
        if ahead_bytes:
            with contextlib.suppress(OutcoreError):
                return self._beside_more(graph, planned, base_bytes + ahead_bytes)
        return self._beside_more(graph, planned, base_bytes)

    def _beside_more(self, graph: PlannedGraph, planned: Planned, base_bytes: int) -> Planned:
        make = partial(self.planner.plan_beside_more, planned=planned, base_bytes=base_bytes)
        more = format_bytes(base_bytes - planned.external.base_bytes)
        return self._again(graph, make, f"beside {more} more")

    def for_calls(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """The same for as many calls as waited for their backward at once.

        Raises InfeasibleError where no plan of the policy fits.
        """
        make = partial(self.planner.plan_for_calls, planned=planned)
        return self._again(graph, make, f"for {graph.status.most_outstanding} calls at once")

    def beside_calls(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """The same with room for what calls of other graphs may hold by now.

        Raises InfeasibleError where no plan of the policy fits.
        """
        make = partial(self.planner.plan_beside_calls, planned=planned)
        return self._again(graph, make, "beside calls of other graphs")

    def leaving_more(self, graph: PlannedGraph, planned: Planned, more_bytes: int) -> Planned:
        """The same with so much more left to later graphs while this one waits.

        Raises InfeasibleError where no plan of the policy fits.
        """
        make = partial(self.planner.plan_leaving, planned=planned, more_bytes=more_bytes)
        more = f"with {format_bytes(more_bytes)} more left to other graphs"
        return self._again(graph, make, more)

    def lacking_bytes(self, graph: PlannedGraph, planned: Planned) -> int:
        """How much more calls of other graphs may hold by now than `planned` has room for.

        Negative where that is less.
        """
        return self.planner.lacking_bytes(self._shares(graph), planned)

    def after(self, graph: PlannedGraph, trial: Trial) -> Planned:
        """Plan `graph` from what a trial of its plan measured. That plan stays if it is the best.

        It also stays where the outer tiers have no room for the better one.
        """
        planned, problem, drift = trial.planned, trial.problem(), trial.drift
        make = partial(self.planner.plan_again, planned=planned, problem=problem, drift=drift)
        plans = self._made(graph, make)
        for better in plans[:-1]:
            with contextlib.suppress(SpillError, HostMemoryError):
                return _tell(drift, self._take(graph, better))
        return _tell(drift, self._take(graph, plans[-1]))

    def _made(self, graph: PlannedGraph, make: Callable[[Shares], T]) -> T:
        """What `make` makes of what the graph may have; its time counts, whatever comes of it."""
        start = time.perf_counter()
        try:
            return make(self._shares(graph))
        finally:
            graph.status.planning_seconds += time.perf_counter() - start

    def _again(self, graph: PlannedGraph, make: Callable[[Shares], Planned], how: str) -> Planned:
        """Plan `graph` once more by `make`, take that plan, and say so."""
        with naming_the_rank():
            planned = self._take(graph, self._made(graph, make))
        log.info("planned again %s. %s", how, self._announcement(graph, planned))
        return planned

    def _shares(self, graph: PlannedGraph) -> Shares:
        return self.planner.shares(graph, self._registry.active())

    def _announcement(self, graph: PlannedGraph, planned: Planned) -> str:
        return announcement(planned, self._settings.policy, self._registry.number(graph))

    # ---- room for them --------------------------------------------------------------------------

    def _take(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """Make room for a plan, and keep it."""
        planned = replace(planned, planning_seconds=graph.status.planning_seconds)
        if self._device.type == "cpu":
            worker.dismiss()  # its memory would be missing while the step runs
        self.bound_memory({graph: planned})  # first: host memory that is locked takes some of it
        nbytes = {tier: planned.predicted.peak(tier) for tier in (Tier.HOST, Tier.DISK)}
        others = (g.planned for g in self._registry.active() if g is not graph)
        if not nbytes[Tier.HOST] and any(p and p.predicted.peak(Tier.HOST) for p in others):
            del nbytes[Tier.HOST]  # theirs stays ready
        try:
            self._driver.reserve(nbytes)
        except OutcoreError:
            self.bound_memory()  # the plans before stay
            raise
        self._remember((graph.digest, graph.status.place), planned)
        return planned

    def _remember(self, key: tuple[str, int], planned: Planned) -> None:
        self._metering.forget_peak()
        self._remembered[key] = planned
        self._remembered.move_to_end(key)
        while len(self._remembered) > max(REMEMBERED_PLANS, self._registry.most_graphs):
            self._remembered.popitem(last=False)

    def bound_memory(self, latest: dict[PlannedGraph, Planned] | None = None) -> None:
        """Hold the process to the plans' peak, unless no graph that runs moves anything.

        `latest`: plans that graphs are about to have.
        """
        latest = latest or {}
        active = {g: g.planned for g in self._registry.active()} | latest
        bound: int | None = None
        if not all(p is None or p.everything_kept for p in active.values()):
            came = {g: g.status.came_bytes for g in active if g not in latest}
            known = [p.peak_bytes + came.get(g, 0) for g, p in active.items() if p]
            bound = max(known) if len(known) == len(active) else self._settings.budget_bytes
        self._driver.bound_memory(self._residency.resident_bytes(), bound)


def _tell(drift: Drift, planned: Planned) -> Planned:
    what = "another plan" if planned.replanned and planned.replanned.changed else "the same plan"
    now = format_seconds(planned.predicted.seconds)
    log.info("%s: planned again with measured times: %s, predicted %s", drift, what, now)
    return planned
