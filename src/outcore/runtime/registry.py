"""Registry: the graphs of one budget: which exist, which run, which have outstanding calls."""

from __future__ import annotations

from weakref import ref

from outcore.runtime.graph import PlannedGraph
from outcore.runtime.status import GraphStatus
from outcore.runtime.steps import Steps
from outcore.runtime.store import Stores

IDLE_STEPS = 4
"""Steps without a call after which a graph counts as one that runs no more, unless it has paused
for longer and come back. Fewer than a graph is profiled for: what torch compiles in its stead is
planned without it."""


class Registry:
    """Who is under one budget. Graphs are held weakly; how one stood that ran last is kept."""

    def __init__(self, stores: Stores, steps: Steps) -> None:
        self.stores, self.steps = stores, steps
        self.most_graphs = 0
        """The most graphs that lived at once."""
        self._entries: list[tuple[ref[PlannedGraph], GraphStatus]] = []

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs whose compiled code torch still has, oldest first."""
        return [g for g in (each() for each, _ in self._entries) if g is not None]

    def active(self) -> list[PlannedGraph]:
        """Graphs that still run; one that a recompile replaced is not among them."""
        waiting = self.stores.counts()
        return [g for g in self.graphs if g in waiting or self._recent(g.status)]

    def statuses(self) -> list[GraphStatus]:
        """How the graphs stand that run, or that ran last: torch may have dropped them since."""
        waiting = self.stores.counts()
        return [s for each, s in self._entries if each() in waiting or self._recent(s)]

    def known(self) -> list[GraphStatus]:
        """How all graphs stand whose code torch still has, and those that ran last."""
        return [s for each, s in self._entries if each() is not None or self._recent(s)]

    def number(self, graph: PlannedGraph) -> int:
        """Which of the graphs that live it is, from 1 on."""
        return 1 + self.graphs.index(graph)

    def runs(self, graph: PlannedGraph) -> bool:
        """Whether it is one that runs (`active`)."""
        return self._recent(graph.status) or bool(self.waiting(graph))

    def _recent(self, status: GraphStatus) -> bool:
        return self.steps.number - status.last_step <= max(IDLE_STEPS, 2 * status.longest_pause)

    def add(self, graph: PlannedGraph) -> None:
        """Take in a captured graph, and forget those that torch has dropped."""
        graph.status.place, graph.status.last_step = self._place(graph), self.steps.number
        self._entries = [(ref(g), g.status) for g in (*self.graphs, graph)]
        self.most_graphs = max(self.most_graphs, len(self._entries))

    def outstanding(self, graph: PlannedGraph) -> dict[PlannedGraph, int]:
        """Other graphs whose backward is still to come, and how many calls of each."""
        found = self.stores.counts()
        found.pop(graph, None)
        return found

    def waiting(self, graph: PlannedGraph) -> int:
        """Calls of `graph` whose backward is still to come."""
        return len(self.stores.of(graph))

    def _place(self, graph: PlannedGraph) -> int:
        """How many graphs like it wait for their backward."""
        return sum(other.digest == graph.digest for other in self.outstanding(graph))

    def settled(self, step: int, beside: PlannedGraph | None = None) -> bool:
        """Whether graphs were called since that step, and none of them is being profiled.

        `beside`: one that does not count.
        """
        called = [s for s in self.statuses() if s.last_step >= step]
        counted = [s for s in called if beside is None or s is not beside.status]
        return bool(counted) and all(s.settled for s in counted)

    def called(self, caller: PlannedGraph) -> None:
        """Count a forward call of `caller`, which now begins.

        Its place among its like is that of its latest call, until it has a plan.
        """
        begins = not len(self.stores)
        if not begins and self.steps.overlong:
            for _, status in self._entries:
                status.forget(self.steps.number)
            begins = True
        self.steps.call(begins=begins)
        if caller.planned is None:
            caller.status.place = self._place(caller)
        caller.status.called(self.steps.number)

    def passed_by(self, caller: int) -> None:
        """Note the forward call of a graph that cannot be planned: others may run no more."""
        self.steps.pass_by(caller, waiting=bool(len(self.stores)))
