"""Registry: the graphs of one budget: which exist, which run, which have outstanding calls."""

from __future__ import annotations

from weakref import ref

from outcore.runtime.budget.steps import Steps
from outcore.runtime.budget.whole_steps import WholeSteps
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import Origin
from outcore.runtime.graphs.status import GraphStatus
from outcore.runtime.step.metered_step import in_backward
from outcore.runtime.step.store import Store, Stores

IDLE_STEPS = 4
"""Steps without a forward call after which a graph counts as idle, unless it has come back after a
longer pause before. No more than a graph is profiled for, so that what torch compiles in its place
is planned without it."""

LEFT_BEHIND = 8
"""Calls that come back, times the most that were outstanding at once (of all graphs), after which
one that began before them is not awaited any more. Somebody may keep its result, and never
differentiate it."""


class Registry:
    """The graphs under one budget (held weakly), and the statuses of those that ran lately."""

    def __init__(self, stores: Stores, steps: Steps) -> None:
        self.stores, self.steps = stores, steps
        self.most_graphs = 0
        """The most graphs registered at once."""
        self.without_loans: set[Origin] = set()
        """Origins of graphs that run no plan for larger sizes any more: graphs after them in the
        step found no room."""
        self.keeps = True
        """Whether calls of which no size returns may keep everything if there is plenty of room
        (`Plans.most_beside_all`). False once a call found too little."""
        self.whole_steps = WholeSteps()
        self._entries: list[tuple[ref[PlannedGraph], GraphStatus]] = []
        """(graph, its status), in order of capture."""

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs whose compiled code torch still has, oldest first."""
        return [g for g in (each() for each, _ in self._entries) if g is not None]

    def active(self) -> list[PlannedGraph]:
        """Graphs that still run. A graph that a recompile replaced soon counts as idle."""
        waiting = self.stores.counts()
        return [g for g in self.graphs if g in waiting or self._recent(g.status)]

    def running_with(self, graph: PlannedGraph) -> list[PlannedGraph]:
        """The active graphs; if `graph` is idle, also it and those that shared steps with it."""
        active = {*self.active()}
        if graph not in active:
            beside = (g for g in self.graphs if g in graph.observed or graph in g.observed)
            active.update((graph, *beside))
        return [g for g in self.graphs if g in active]

    def statuses(self) -> list[GraphStatus]:
        """Statuses of the graphs that run or ran lately; torch may have dropped their code."""
        waiting = self.stores.counts()
        return [s for each, s in self._entries if each() in waiting or self._recent(s)]

    def known(self) -> list[GraphStatus]:
        """Statuses of all graphs whose code torch still has, and of those that ran lately."""
        return [s for each, s in self._entries if each() is not None or self._recent(s)]

    def number(self, graph: PlannedGraph) -> int:
        """The number of `graph` among the live graphs, from 1."""
        return 1 + self.graphs.index(graph)

    def runs(self, graph: PlannedGraph) -> bool:
        """Whether `graph` is one of the `active` graphs."""
        return self._recent(graph.status) or bool(self.waiting(graph))

    def _recent(self, status: GraphStatus) -> bool:
        history = status.history
        return self.steps.number - history.last_step <= max(IDLE_STEPS, 2 * history.longest_pause)

    def add(self, graph: PlannedGraph) -> None:
        """Register a captured graph, and forget those that torch has dropped."""
        graph.status.place, graph.status.history.last_step = self._place(graph), self.steps.number
        self._entries = [(ref(g), g.status) for g in (*self.graphs, graph)]
        self.most_graphs = max(self.most_graphs, len(self._entries))

    def tell(self, graph: PlannedGraph) -> None:
        """Note that calls of `graph` hold something else from now on.

        Graphs that saw such calls outstanding will check that their plans have room.
        """
        for other in self.graphs:
            if graph in other.observed:  # `|=` could undo what another thread sets meanwhile
                other.observed.unchecked = True

    def outstanding(self, graph: PlannedGraph) -> dict[PlannedGraph, int]:
        """Other graphs with outstanding calls, and the number of these calls."""
        found = self.stores.counts()
        found.pop(graph, None)
        return found

    def sizes_beside(self, graph: PlannedGraph) -> int:
        """Number of other sizes for which there is a graph like `graph`."""
        alike = {g.identity for g in self.graphs if g.origin == graph.origin}
        return len(alike - {graph.identity})

    @property
    def many_returns(self) -> int:
        """More backward calls than there are in a step, as far as one can know."""
        return LEFT_BEHIND * sum(status.at_once.most for _, status in self._entries)

    def awaits(self, graph: PlannedGraph | None = None) -> bool:
        """Whether a call (of `graph`, if given) is outstanding that should come back in this step.

        A call that has come back before need not (`retain_graph`), nor one that was left behind:
        `many_returns` others have come back since it began. Within a backward call all should.
        """
        stores = self.stores.all() if graph is None else self.stores.of(graph)
        if not stores or in_backward():
            return bool(stores)
        latest, returns = stores[-1].visit, self.steps.returns
        if latest.returns == returns and not latest.backward_stop:
            return True
        since = returns - self.many_returns
        return any(not s.visit.backward_stop and s.visit.returns > since for s in stores)

    def follows_closely(self) -> bool:
        """Whether no call that began lately holds more than it would by its graph's present plan.

        Under `retain_graph` the latest call may hold its data for one more step, in which there may
        be a new plan.
        """
        since = self.steps.returns - self.many_returns
        lately = (s for s in self.stores.all() if s.visit.returns > since)
        return not any(_holds_more(store) for store in lately)

    def waiting(self, graph: PlannedGraph) -> int:
        """Number of outstanding calls of `graph`."""
        return len(self.stores.of(graph))

    def _place(self, graph: PlannedGraph) -> int:
        """Number of other graphs with the same trace that have outstanding calls."""
        return sum(other.identity == graph.identity for other in self.outstanding(graph))

    def settled(self, step: int, beside: PlannedGraph | None = None) -> bool:
        """Whether graphs were called since step number `step`, and all of those are settled.

        `beside`: a graph to leave out.
        """
        called = self._called_since(step, beside)
        return bool(called) and all(s.settled for s in called)

    def follow_plans(self, step: int, beside: PlannedGraph | None = None) -> bool:
        """As `settled`, for graphs whose checked steps run a plan, too."""
        called = self._called_since(step, beside)
        return bool(called) and all(s.settled or s.lent is not None for s in called)

    def _called_since(self, step: int, beside: PlannedGraph | None) -> list[GraphStatus]:
        called = (s for s in self.statuses() if s.history.last_step >= step)
        return [s for s in called if beside is None or s is not beside.status]

    def called(self, caller: PlannedGraph) -> None:
        """Count the forward call of `caller` that begins now.

        Until the graph has a plan, its place is that of its latest call.
        """
        begins = not self.awaits()
        if not begins and self.steps.overlong:
            for _, status in self._entries:
                status.history.forget(self.steps.number)
            begins = True
        self.steps.call(begins=begins)
        if begins:
            self.whole_steps.begin()
        self.whole_steps.call(caller.captured.trace)
        if caller.planned is None:
            caller.status.place = self._place(caller)
        caller.status.history.called(self.steps.number)

    def passed_by(self, caller: int) -> None:
        """Note the forward call of a graph that cannot be planned: a step may begin with it."""
        self.steps.pass_by(caller, waiting=self.awaits())


def _holds_more(store: Store) -> bool:
    graph = store.visit.owner()
    planned = graph.execution if isinstance(graph, PlannedGraph) else None
    return planned is not None and store.private_bytes > planned.executable.private_bytes
