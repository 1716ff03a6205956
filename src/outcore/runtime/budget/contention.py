"""contention: replan graphs whose calls are outstanding together, so that each has room."""

from __future__ import annotations

from math import inf

from outcore.errors import InfeasibleError, OutcoreError
from outcore.ir.margin import slack_bytes
from outcore.runtime.budget.metering import Metering
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.registry import Registry
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.planning.shares import kept_bytes

MOST_ASKED = 4
"""How often a graph asks another for room without an answer. The other one may never be called
again."""


class Contention:
    """Replans graphs when other calls become outstanding, and asks graphs to hold less.

    A planned graph answers at its next call that begins while no other call of it is outstanding.
    """

    def __init__(self, registry: Registry, metering: Metering, plans: Plans) -> None:
        self._registry, self._metering, self._plans = registry, metering, plans

    # ---- planned graphs -------------------------------------------------------------------------

    def beside_calls(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan with room for what calls of other graphs hold now; `execution` if none is needed.

        If no such plan fits, `execution` stays, and another graph may be asked to hold less.
        """
        if not graph.observed.unchecked:
            return execution
        graph.observed.unchecked = False  # first: another thread may set it meanwhile
        try:
            return self._checked(graph, execution)
        except BaseException:
            graph.observed.unchecked = True
            raise

    def _checked(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """As `beside_calls`, for a plan that may have too little room."""
        planned, status = execution.planned, graph.status
        lacking = self._plans.lacking_bytes(graph, planned)
        if lacking <= slack_bytes(planned.problem.budget_bytes):
            status.refused.external_bytes = inf
        elif planned.external_bytes + lacking < status.refused.external_bytes:
            try:
                execution = graph.settle(self._plans.beside_calls(graph, planned))
                graph.observed.unchecked = False  # its new plan is what is looked at next
                # The plan may expect others to hold less than they will. Then remember what is
                # still lacking, or two graphs would replan each other forever.
                still = self._plans.lacking_bytes(graph, execution.planned)
                more = execution.planned.external_bytes + still
                status.refused.external_bytes = inf if still < lacking else more
            except OutcoreError as error:  # the report says so, unless there is more room soon
                if self.keep_less(graph):
                    graph.observed.unchecked = True
                    return execution
                self._ask(graph, error)
                status.refused.external_bytes = planned.external_bytes + lacking
        return execution

    def leaving_more(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan that leaves later graphs as much of what they asked for as possible.

        `execution` if no graph asked, or no such plan fits.
        """
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
        """A plan that leaves later graphs `more_bytes` more; None if none fits.

        Leaving unused room does not help others. So while the graph holds as much as before, this
        tries twice as many bytes, and returns the last plan that was found.
        """
        status, kept = graph.status, kept_bytes(graph)
        found: PlannedExecution | None = None
        while True:
            left = planned.left_bytes + more_bytes
            try:
                found = graph.settle(self._plans.leaving_more(graph, planned, more_bytes))
                status.left_at_least = max(left, status.left_at_least)
            except OutcoreError:  # the graph that asked reports it
                status.refused.left_bytes = min(left, status.refused.left_bytes)
                return found
            if kept_bytes(graph) < kept:
                return found
            if found.planned.left_bytes < left:  # it cannot leave more
                status.refused.left_bytes = -inf
                return found
            more_bytes *= 2

    def for_calls(self, graph: PlannedGraph, execution: PlannedExecution) -> PlannedExecution:
        """A plan for more calls, if more are expected at once than the plan was made for.

        `execution` if not, or if no such plan fits.
        """
        planned, status = execution.planned, graph.status
        if status.at_once.expected <= max(planned.calls, status.refused.calls):
            return execution
        try:
            return graph.settle(self._plans.for_calls(graph, planned))
        except OutcoreError:  # the report says so
            status.refused.calls = status.at_once.expected
            status.refused.external_bytes = inf  # there may be a plan for fewer
            graph.observed.unchecked = True
            return execution

    # ---- for a graph without a plan -------------------------------------------------------------

    def make_room(self, graph: PlannedGraph, error: InfeasibleError) -> bool:
        """Have other graphs hold less from their next calls on: by what `error` says is lacking.

        Returns False if none can.
        """
        return self.keep_less(graph) or self._lend_nothing(graph) or self._ask(graph, error)

    def _lend_nothing(self, graph: PlannedGraph) -> bool:
        """Have graphs that are checked under a lent plan before `graph` run the floor program.

        That holds less while they wait. Graphs for other sizes of them borrow no plan either.
        Returns False if there are none.
        """
        earlier = [g for g in self._registry.active() if g in graph.observed]
        plans = [(g, g.status.lent) for g in earlier]
        unbounded = [g for g, plan in plans if plan is not None and not plan.bounded]
        lent = [g for g in unbounded if g.may_borrow]
        for each in lent:
            each.may_borrow = False
            self._registry.without_loans.update(filter(None, [each.origin]))
        return bool(lent)

    def keep_less(self, graph: PlannedGraph) -> bool:
        """Stop graphs without a plan from keeping everything: `graph` found no room.

        Those without backward calls (`Keeping`), and others whose calls wait (`Registry.keeps`).
        Returns False if no graph does.
        """
        registry = self._registry
        profiled = [(g, g.profiling) for g in registry.graphs if g.profiling is not None]
        keeping = [g for g, profiling in profiled if g.may_keep and profiling.keeping is not None]
        for each in keeping:
            each.may_keep = False
            self._metering.forget_peak()
        waiting = registry.outstanding(graph)
        kept = registry.keeps and any(p.keeps for g, p in profiled if g in waiting)
        registry.keeps &= not kept
        return bool(keeping) or kept

    def _ask(self, graph: PlannedGraph, error: OutcoreError) -> bool:
        """Ask the planned graph that holds the most while `graph` runs to leave what is lacking.

        Returns False if no graph can, if none answers (`MOST_ASKED`), or if `error` is not about
        device memory.
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
    """Whether the planned `graph` may leave so much more: it has not refused that much yet."""
    planned = graph.planned
    return planned is not None and (
        planned.left_bytes + more_bytes < graph.status.refused.left_bytes
    )
