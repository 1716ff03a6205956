"""contention: graphs whose calls wait beside each other make room for each other."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outcore.errors import InfeasibleError, OutcoreError
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.margin import slack_bytes
from outcore.runtime.metering import Metering
from outcore.runtime.planning import left_bytes
from outcore.runtime.plans import Plans
from outcore.runtime.registry import Registry
from outcore.runtime.shares import kept_bytes

if TYPE_CHECKING:  # a graph asks it
    from outcore.runtime.execution import PlannedExecution
    from outcore.runtime.planned import Planned

MOST_ASKED = 4
"""How often a graph asks another for room that does not hear of it: it may never be called again.
"""


class Contention:
    """Plans again beside calls that are new, and asks graphs that hold much to hold less."""

    def __init__(self, registry: Registry, metering: Metering, plans: Plans) -> None:
        self._registry, self._metering, self._plans = registry, metering, plans

    def tell(self, graph: PlannedGraph) -> None:
        """Have those check their room that saw calls of `graph` wait: what these hold is new."""
        for other in self._registry.graphs:
            other.observed.unchecked |= graph in other.observed

    # ---- planned again --------------------------------------------------------------------------

    def beside_calls(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan beside what calls of other graphs hold by now; `execution` where none fits."""
        planned, status = execution.planned, graph.status
        if not graph.observed.unchecked:
            return execution
        lacking = self._plans.lacking_bytes(graph, planned)
        if lacking <= slack_bytes(planned.problem.budget_bytes):
            status.refused_external_bytes = inf
        elif planned.external_bytes + lacking < status.refused_external_bytes:
            try:
                execution = graph.settle(self._plans.beside_calls(graph, planned))
                # Others may be hoped to hold less, and not come to: two would wake each other.
                still = self._plans.lacking_bytes(graph, execution.planned)
                more = execution.planned.external_bytes + still
                status.refused_external_bytes = inf if still < lacking else more
            except OutcoreError as error:  # the report tells, unless there is more room soon
                if self.keep_less():
                    return execution
                self._ask(graph, error)
                status.refused_external_bytes = planned.external_bytes + lacking
        graph.observed.unchecked = False
        return execution

    def leaving_more(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan that leaves later graphs what one asks for: the most for which one fits."""
        status, planned = graph.status, execution.planned
        asked, status.asked_bytes = status.asked_bytes, set()
        if not asked:
            return execution
        for each in self._registry.graphs:
            each.asked.pop(graph, None)
        for more in sorted(asked, reverse=True):
            found = self._holding_less(graph, planned, more)
            if found is not None:
                return found
        return execution

    def _holding_less(
        self, graph: PlannedGraph, planned: Planned, more_bytes: int
    ) -> PlannedExecution | None:
        """A plan that leaves so much more, and twice that while it holds as much as before.

        What it had to spare is no help to others. The last for which there is one; None: none is.
        """
        status, kept = graph.status, kept_bytes(graph)
        found: PlannedExecution | None = None
        while True:
            left = left_bytes(planned) + more_bytes
            try:
                found = graph.settle(self._plans.leaving_more(graph, planned, more_bytes))
                status.left_at_least = max(left, status.left_at_least)
            except OutcoreError:  # the graph that asked will tell
                status.refused_left_bytes = min(left, status.refused_left_bytes)
                return found
            if kept_bytes(graph) < kept:
                return found
            if left_bytes(found.planned) < left:  # no more
                status.refused_left_bytes = -inf
                return found
            more_bytes *= 2

    def for_calls(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan for more calls, if more waited at once than was known, and one fits."""
        planned, status = execution.planned, graph.status
        if status.most_outstanding <= max(planned.calls, status.refused_calls):
            return execution
        try:
            return graph.settle(self._plans.for_calls(graph, planned))
        except OutcoreError:  # the report tells
            status.refused_calls = status.most_outstanding
            status.refused_external_bytes = inf  # there may be a plan for fewer
            graph.observed.unchecked = True
            return execution

    # ---- for a graph that has no plan -----------------------------------------------------------

    def make_room(self, graph: PlannedGraph, error: InfeasibleError) -> bool:
        """Have others hold less from their next calls on, as `error` says that `graph` lacks.

        False where none can.
        """
        return self.keep_less() or self._ask(graph, error)

    def keep_less(self) -> bool:
        """Have graphs that nobody differentiates hold as little as while they were profiled.

        False where none keeps more.
        """
        profiled = [g for g in self._registry.graphs if g.may_keep and g.profiling is not None]
        keeping = [g for g in profiled if g.profiling and g.profiling.keeping is not None]
        for graph in keeping:
            graph.may_keep = False
            self._metering.forget_peak()
        return bool(keeping)

    def _ask(self, graph: PlannedGraph, error: OutcoreError) -> bool:
        """Have the one that holds the most while `graph` runs leave as much more as is lacking.

        False where none can, none of those hears of it, or it is not the device's memory.
        """
        if not isinstance(error, InfeasibleError) or error.tier != "device":
            return False
        lacking = error.floor_bytes - error.budget_bytes
        earlier = [g for g in self._registry.active() if g in graph.observed]
        able = [g for g in earlier if graph.asked.get(g, 0) < MOST_ASKED and _leaves(g, lacking)]
        if not able or lacking <= 0:
            return False
        most = max(able, key=kept_bytes)
        most.status.asked_bytes.add(lacking)
        graph.asked[most] = graph.asked.get(most, 0) + 1
        return True


def _leaves(graph: PlannedGraph, more_bytes: int) -> bool:
    """Whether a graph could leave so much more while it waits, for all that is known."""
    planned = graph.planned
    return planned is not None and (
        left_bytes(planned) + more_bytes < graph.status.refused_left_bytes
    )
