"""seen: which calls of other graphs waited when calls of one began, and what was held besides.

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
        self.wider = False
        """Whether there is a mix that was not there when the graph was planned last."""
        self.base_bytes: int | None = None
        """The most that was held besides, but for what waiting calls held; None: nobody looked."""

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
        self.wider = True
        self._mixes = [mix for mix in self._mixes if not _within(mix, waiting)]
        if len(self._mixes) < MOST_MIXES:
            self._mixes.append(WeakKeyDictionary())
        for graph, calls in waiting.items():
            self._mixes[-1][graph] = max(calls, self._mixes[-1].get(graph, 0))

    def note_base(self, nbytes: int) -> None:
        """Take what was held besides a call as it began, but for what waiting calls held."""
        self.base_bytes = nbytes if self.base_bytes is None else max(nbytes, self.base_bytes)

    def grow(self, nbytes: int) -> None:
        """Take that so much more is held by now."""
        self.base_bytes = None if self.base_bytes is None else self.base_bytes + nbytes

    def to_come_bytes(
        self,
        resident_bytes: int,
        now: Waiting,
        active: Collection[PlannedGraph],
        will_hold: Callable[[PlannedGraph], int],
    ) -> tuple[int, ...]:
        """What may be held besides a call as it begins, beyond `resident_bytes`.

        With the most calls of each graph, and then with those of one mix, if that is less.
        `will_hold`: bytes of each waiting call of a graph; those of the `active` ones count. Where
        nobody looked, the calls of `now` are among what is resident.
        """
        each = {g: will_hold(g) for g in {g for mix in self._mixes for g in mix} if g in active}
        looked = self.base_bytes is not None
        held = (self.base_bytes or 0) - resident_bytes * looked
        known = {} if looked else now

        def bytes_of(mix: Waiting) -> int:
            calls = ((g, min(mix.get(g, 0), g.standing.planned_for)) for g in each)
            return sum(max(0, n - known.get(g, 0)) * each[g] for g, n in calls)

        most = bytes_of({g: self.most(g) for g in each})
        of_one = max(map(bytes_of, self._mixes), default=0)
        return tuple(dict.fromkeys((max(0, held + most), max(0, held + of_one))))


def _within(mix: Waiting, other: Waiting) -> bool:
    return all(other.get(graph, 0) >= calls for graph, calls in mix.items())
