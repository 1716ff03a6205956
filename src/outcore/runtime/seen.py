"""seen: which calls of other graphs waited when a call of one graph began, and what was held then.

Steps need not be alike: where layers are left out now and then, each step has another mix of calls
that wait. Plans leave room for the largest of these mixes, not for the most of each graph at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # a graph sees others
    from outcore.runtime.graph import PlannedGraph

Waiting: TypeAlias = Mapping["PlannedGraph", int]
"""Graphs, and how many calls of each wait for their backward."""

MOST_SEEN = 64
"""Mixes that are told apart; what comes after that is one, with the most of each graph."""


@dataclass(slots=True)
class Sight:
    """What was held as a profiled call began, and what of that was each waiting call's."""

    resident_bytes: int
    waiting: WeakKeyDictionary[PlannedGraph, int]
    holding: WeakKeyDictionary[PlannedGraph, int]
    """Bytes of one call; of graphs that are not in it, perhaps nothing."""


class Seen:
    """What calls of one graph met when they began."""

    def __init__(self) -> None:
        self._mixes: list[WeakKeyDictionary[PlannedGraph, int]] = []
        """None of which is within another."""
        self._sights: list[Sight] = []

    def __contains__(self, graph: PlannedGraph) -> bool:
        """Whether calls of `graph` waited.

        Where the first to be called comes back first, each of two has seen the other.
        """
        return any(graph in mix for mix in self._mixes)

    def note(self, waiting: Waiting) -> None:
        """Take who waited as a call began, forward or backward."""
        if any(_within(waiting, mix) for mix in self._mixes):
            return
        self._mixes = [mix for mix in self._mixes if not _within(mix, waiting)]
        if len(self._mixes) < MOST_SEEN:
            self._mixes.append(WeakKeyDictionary())
        _raise(self._mixes[-1], waiting)

    def note_resident(
        self, waiting: Waiting, holding: Mapping[PlannedGraph, int], resident_bytes: int
    ) -> None:
        """Take what was held besides a profiled call as it began, that of waiting ones included."""
        for sight in self._sights:
            if dict(sight.waiting) == dict(waiting) and dict(sight.holding) == dict(holding):
                break
        else:
            if len(self._sights) < MOST_SEEN:
                sight = Sight(0, WeakKeyDictionary(waiting), WeakKeyDictionary(holding))
                self._sights.append(sight)
            else:
                sight = self._sights[-1]
                sight.holding.clear()
                _raise(sight.waiting, waiting)
        sight.resident_bytes = max(sight.resident_bytes, resident_bytes)

    def forget_residents(self) -> None:
        """Begin again with what is held: the graph is profiled anew."""
        self._sights.clear()

    def to_come_bytes(
        self,
        now: Waiting,
        active: Collection[PlannedGraph],
        in_turn: Collection[PlannedGraph],
        will_hold: Callable[[PlannedGraph], int],
    ) -> int:
        """What may be held as a call begins, beyond the most that was held as one did.

        By waiting calls of the graphs that are `active`: each `will_hold` so many bytes, which for
        those `in_turn` may be more than it was. Where nothing was noted, all that is held `now` is.
        """

        def held_bytes(sight: Sight) -> int:
            each = ((g, n) for g, n in sight.waiting.items() if g in active and g in in_turn)
            more = (n * max(0, will_hold(g) - sight.holding.get(g, 0)) for g, n in each)
            return sight.resident_bytes + sum(more)

        as_it_is = {g: will_hold(g) for g in now if not self._sights and g in active}
        here = Sight(0, WeakKeyDictionary(now), WeakKeyDictionary(as_it_is))
        sights = self._sights or [here]
        most = max(map(held_bytes, sights))
        for each in self._mixes:
            mix = {g: min(n, g.standing.planned_for) for g, n in each.items() if g in active}
            nearest = min(sights, key=lambda sight: sum(_beyond(mix, sight.waiting).values()))
            missing = _beyond(mix, nearest.waiting).items()
            if missing:
                more = sum(calls * will_hold(graph) for graph, calls in missing)
                most = max(most, held_bytes(nearest) + more)
        return most - max(sight.resident_bytes for sight in sights)


def _beyond(mix: Waiting, other: Waiting) -> dict[PlannedGraph, int]:
    """The calls of `mix` that `other` does not have."""
    more = {graph: calls - other.get(graph, 0) for graph, calls in mix.items()}
    return {graph: calls for graph, calls in more.items() if calls > 0}


def _within(mix: Waiting, other: Waiting) -> bool:
    return not _beyond(mix, other)


def _raise(mix: WeakKeyDictionary[PlannedGraph, int], other: Waiting) -> None:
    for graph, calls in other.items():
        mix[graph] = max(calls, mix.get(graph, 0))
