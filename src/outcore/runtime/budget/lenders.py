"""lenders: the plans for larger sizes of a graph, which smaller ones may run (`lending`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from outcore.errors import OutcoreError
from outcore.ir.margin import margin_bytes
from outcore.ir.program import Program
from outcore.runtime.budget.growth import Growth
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.registry import Registry
from outcore.runtime.budget.residency import Residency
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import Origin, covers, total_bytes
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.profiling import MANY_SIZES
from outcore.runtime.graphs.shown import Shown
from outcore.runtime.settings.options import Settings


class Lenders:
    """Finds the plan of the same graph at larger sizes, and makes or renews it if there is a need.

    The graph at those sizes may never be called again.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        residency: Residency,
        plans: Plans,
        growth: Growth,
    ) -> None:
        self._settings, self._registry, self._residency = settings, registry, residency
        self._plans, self._growth = plans, growth
        self._shared: set[Origin] = set()
        """Origins of graphs whose calls were outstanding as others began."""
        self._shown: WeakKeyDictionary[PlannedGraph, Shown] = WeakKeyDictionary()
        """Graphs that were planned from checked steps alone -> what those have shown."""
        self._refused: dict[Origin, int] = {}
        """Origin -> external bytes for which no plan was found last."""

    def lent(
        self, graph: PlannedGraph, inputs: Sequence[Any], kept: Program | None
    ) -> tuple[Planned, int] | None:
        """The plan that the same graph has for larger sizes, for those of `graph`.

        With the most external bytes with which its checked steps fit. None if there is no such
        plan, or it does not fit beside what is held now. Of several, that for the smallest sizes is
        taken. Not for graphs with several outstanding calls of the same sizes, or whose backward
        calls are repeated.

        If calls of others begin while calls of the graph wait, plans from checked steps alone are
        lent only if such calls hold no more than under the floor program, or `kept` if that is
        given (`Plans.most_beside_all`): it is not known which sizes come next, and how much room
        they need. Raises InfeasibleError if not even the floor program fits.
        """
        given, registry = self._settings.given, self._registry
        self._shared.update(g.origin for g in registry.outstanding(graph) if g.origin is not None)
        refused = graph.origin in registry.without_loans
        if refused or given.file is not None or given.rules or graph.status.at_once.expected > 1:
            return None
        lender = self._planned(graph, kept) or self._planned_from_checks(graph, inputs, kept)
        while lender is not None and lender.planned is not None:
            bounded = lender.planned.early and graph.origin in self._shared
            found = self._plans.lent(graph, inputs, lender.planned, as_profiled=bounded, kept=kept)
            if found is not None:
                lender.lent_in = registry.steps.number
                return found
            lender = self._with_more_room(lender, lender.planned, graph, inputs, kept)
        return None

    def _planned(self, graph: PlannedGraph, kept: Program | None) -> PlannedGraph | None:
        """The graph with a plan for the smallest sizes that are large enough for `graph`."""
        needed = total_bytes(graph.captured.trace)
        planned = [
            (nbytes, each)
            for each in self._alike(graph)
            if each.planned is not None
            and self._lends(each, each.planned, kept)
            and each.planned.calls == 1
            and each.planned.retaining_bytes is None
            and (nbytes := total_bytes(each.captured.trace)) >= needed
        ]
        return _first_that_covers(sorted(planned, key=itemgetter(0)), graph)

    def _lends(self, graph: PlannedGraph, planned: Planned, kept: Program | None) -> bool:
        """Whether to lend the plan of a graph.

        A plan from checked steps is lent by the graph that it was made for. Where it has to be
        bounded, it is lent only if it is, and by the floor program unless there is `kept`.
        """
        if not planned.early:
            return True
        bounded = planned.bounded or graph.origin not in self._shared
        return bounded and self._shown_early(graph, kept) is not None

    def _planned_from_checks(
        self, graph: PlannedGraph, inputs: Sequence[Any], kept: Program | None
    ) -> PlannedGraph | None:
        """The graph for the largest sizes, with a new plan from what its checked steps showed.

        If sizes hardly return, none is ever timed. None if there are few sizes, or if no plan is
        found.
        """
        origin = graph.origin
        if self._registry.sizes_beside(graph) < MANY_SIZES or origin is None:
            return None
        checked = [
            (total_bytes(each.captured.trace), each)
            for each in self._alike(graph)
            if self._shown_early(each, kept) is not None
            and each.status.at_once.expected == 1
            and not each.status.retained
        ]
        lender = _first_that_covers(sorted(checked, key=itemgetter(0), reverse=True), graph)
        shown = None if lender is None else self._shown_early(lender, kept)
        if lender is None or shown is None:
            return None
        base_bytes = self._residency.base_bytes(graph, inputs)
        if self._is_refused(origin, base_bytes):
            return None
        if self._residency.collect():
            base_bytes = self._residency.base_bytes(graph, inputs)
        for beyond in (self._margin_bytes, 0):
            beside = shown.beside(base_bytes + beyond)
            try:
                planned = self._plans.first(lender, beside, as_profiled=origin in self._shared)
            except OutcoreError:
                pass
            else:
                lender.settle(planned).adopted = True
                lender.observed.called.count_firsts()  # calls of it show what is held beyond that
                self._shown[lender] = beside
                return lender
            self._residency.collect(again=True)  # the error's frames hold inputs of the call
        self._refused[origin] = base_bytes
        return None

    def _shown_early(self, graph: PlannedGraph, kept: Program | None) -> Shown | None:
        """What checked steps of a graph have shown, if it can be planned from that; else None.

        Where plans have to be bounded, those steps must not have kept everything, unless there is
        `kept`.
        """
        planned, profiling, shown = graph.planned, graph.profiling, None
        if planned is not None:
            shown = self._shown.get(graph) if planned.early else None
        elif profiling is not None and profiling.lent is None:
            shown = profiling.shown_early()
        if shown is None:
            return None
        unbounded = shown.kept and kept is None and graph.origin in self._shared
        return None if unbounded else shown

    def _with_more_room(
        self,
        lender: PlannedGraph,
        planned: Planned,
        graph: PlannedGraph,
        inputs: Sequence[Any],
        kept: Program | None,
    ) -> PlannedGraph | None:
        """A graph whose plan has room for what is held now, as a call of `graph` begins.

        `planned`, the plan of `lender`, had no room. It may have if garbage was collected. None if
        there is no such plan, or if there was room for external memory.
        """
        most = planned.external.base_bytes
        base_bytes, origin = self._residency.base_bytes(graph, inputs), lender.origin
        if base_bytes <= most or origin is None or self._is_refused(origin, base_bytes):
            return None
        if self._residency.collect():
            base_bytes = self._residency.base_bytes(graph, inputs)
            if base_bytes <= most:
                return lender
        if planned.bounded:  # so must be the plan that takes its place
            return self._planned_from_checks(graph, inputs, kept)
        for beyond in (self._margin_bytes, 0):
            with contextlib.suppress(OutcoreError):
                self._growth.replan(lender, planned, base_bytes + beyond)
                return lender
        self._refused[origin] = base_bytes
        self._residency.collect(again=True)  # as above
        return None

    @property
    def _margin_bytes(self) -> int:
        """Room beyond what is held now: else the next step may need a little more."""
        return margin_bytes(self._settings.budget_bytes)

    def _is_refused(self, origin: Origin, base_bytes: int) -> bool:
        """Whether no plan was found with about `base_bytes` held, or less."""
        refused = self._refused.get(origin)
        return refused is not None and base_bytes > refused - self._margin_bytes

    def _alike(self, graph: PlannedGraph) -> Iterator[PlannedGraph]:
        graphs = self._registry.graphs
        return (each for each in graphs if each is not graph and each.origin == graph.origin)


def _first_that_covers(
    lenders: Sequence[tuple[int, PlannedGraph]], graph: PlannedGraph
) -> PlannedGraph | None:
    trace = graph.captured.trace
    return next((each for _, each in lenders if covers(each.captured.trace, trace)), None)
