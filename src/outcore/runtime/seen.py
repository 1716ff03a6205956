"""seen: which calls of other graphs waited when calls of one began.

Steps need not be alike: where layers are left out now and then, each step has another mix of calls
that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # a graph sees others
    from outcore.runtime.graph import PlannedGraph

Waiting: TypeAlias = Mapping["PlannedGraph", int]
"""Graphs, and how many calls of each wait for their backward."""

MOST_MIXES = 64
"""Mixes that are told apart; what comes after that is one, with the most of each graph."""


class Seen:
    """What calls of one graph met when they began."""

    def __init__(self) -> None:
        self._mixes: list[WeakKeyDictionary[PlannedGraph, int]] = []
        """None of which is within another."""
        self.unchecked = False
        """Whether the plan may have too little room: a mix came, or one in a mix has another plan.
        """

    def __contains__(self, graph: PlannedGraph) -> bool:
        """Whether calls of `graph` waited.

        Where the first to be called comes back first, each of two has seen the other.
        """
        return any(graph in mix for mix in self._mixes)

    def most(self, graph: PlannedGraph) -> int:
        """The most calls of `graph` that waited."""
        return max((mix.get(graph, 0) for mix in self._mixes), default=0)

    def note(self, waiting: Waiting) -> None:
        """Take who waited as a call began, forward or backward."""
        if not waiting or any(_within(waiting, mix) for mix in reversed(self._mixes)):
            return
        self.unchecked = True
        self._mixes = [mix for mix in self._mixes if not _within(mix, waiting)]
        if len(self._mixes) < MOST_MIXES:
            self._mixes.append(WeakKeyDictionary())
        for graph, calls in waiting.items():
            self._mixes[-1][graph] = max(calls, self._mixes[-1].get(graph, 0))

    def waiting_bytes(
        self, active: Collection[PlannedGraph], will_hold: Callable[[PlannedGraph], int]
    ) -> tuple[int, int]:
        """What waiting calls may hold: the most of each graph, and those of one mix.

        `will_hold`: bytes of each waiting call of a graph; those of the `active` ones count.
        """
        each = {g: will_hold(g) for g in {g for mix in self._mixes for g in mix} if g in active}

        def bytes_of(mix: Waiting) -> int:
            return sum(min(mix.get(g, 0), g.standing.planned_for) * each[g] for g in each)

        most = bytes_of({g: self.most(g) for g in each})
        return most, max(map(bytes_of, self._mixes), default=0)


def _within(mix: Waiting, other: Waiting) -> bool:
    return all(other.get(graph, 0) >= calls for graph, calls in mix.items())
