"""observations: record the external memory that calls of one graph met, per mix of calls.

A mix is the calls that are outstanding at once. Steps may differ: if layers are skipped at random,
each step has another mix. So external memory is stored per mix, as the excess: how much more is
held than as the first call of that step began, without what outstanding calls alone hold
(docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:  # a graph holds its Observations
    from outcore.runtime.graphs.graph import PlannedGraph

Counts: TypeAlias = Mapping["PlannedGraph", int]
"""Graph -> number of its calls: those outstanding, or those that came back."""

Bytes: TypeAlias = Callable[["PlannedGraph"], int]
"""Bytes per call of a given graph."""

Others: TypeAlias = dict[ref["PlannedGraph"], int]
"""As `Counts`, with weak references to the graphs."""

Key: TypeAlias = tuple[int, frozenset[tuple[ref["PlannedGraph"], int]]]
"""A mix as a dictionary key: own calls, and calls of other graphs."""

MOST_KNOWN = 128
"""Mixes that are recognized without comparing them with all stored mixes."""

MOST_MIXES = 64
"""Mixes that are stored one by one. Further mixes are merged into the last one, which then stands
for all mixes with no more calls of each graph than it has."""


@dataclass(slots=True, eq=False)
class Mix:
    """Calls that are outstanding at once, and the external memory held then."""

    own: int
    """Outstanding calls of the graph itself, without the call that begins or comes back."""
    others: Others
    """Outstanding calls of other graphs."""
    excess_bytes: int | None = None
    """External memory in excess of that as the first call of the step began; None: not counted."""
    several: bool = False
    """Whether this mix stands for all mixes with no more calls of each graph."""

    def within(self, other: Mix) -> bool:
        """Whether `other` covers this mix: as many own calls, and no fewer of each other graph.

        If `other` stands for several mixes, fewer own calls are covered too.
        """
        own = self.own <= other.own if other.several else self.own == other.own
        if not own or not self.others.keys() <= other.others.keys():
            return False
        return all(other.others[graph] >= n for graph, n in self.others.items() if n > 1)

    def forget_the_dead(self) -> None:
        """Remove graphs that no longer exist."""
        for graph in [each for each in self.others if each() is None]:
            del self.others[graph]

    def add(self, other: Mix) -> None:
        """Merge `other` into this mix: the most calls of each graph, the larger excess."""
        self.own, self.several = max(self.own, other.own), True
        for graph, calls in other.others.items():
            self.others[graph] = max(calls, self.others.get(graph, 0))
        if other.excess_bytes is not None:
            known = other.excess_bytes if self.excess_bytes is None else self.excess_bytes
            self.excess_bytes = max(known, other.excess_bytes)


class Mixes:
    """The mixes that calls of one graph met, without those that another surpasses.

    A mix surpasses another if it covers it (`Mix.within`) and has no smaller excess.
    """

    def __init__(self) -> None:
        self._mixes: list[Mix] = []
        self._most: Others = {}
        """The most calls of each other graph in any of the mixes."""
        self._before: WeakKeyDictionary[PlannedGraph, int] | None = None
        """Calls of other graphs that were outstanding every time that no own call was. None: not
        noted yet."""
        self._waited = 0
        """`len(_before)` when it was last set anew. If it is smaller now, a graph was freed and
        another may have replaced it, so `_before` is set anew."""
        self._beyond_first = 0
        """The largest excess when no own call was outstanding."""
        self._known: dict[Key, int | None] = {}
        """Mixes noted before -> an excess that stored mixes cover for them; None: none was counted.
        Most steps have the same mixes, so `note` need not look at all of them again."""

    def __iter__(self) -> Iterator[Mix]:
        """The stored mixes."""
        return iter(self._mixes)

    def knows(self, own: int, others: Counts, *, counted: bool) -> bool:
        """Whether exactly this mix was noted lately; `counted`: with its external memory."""
        key = _key(own, _weakly(others))
        return key in self._known and not (counted and self._known[key] is None)

    def counted(self, own: int, others: Counts) -> bool:
        """Whether external memory was counted for a mix that covers this one."""
        mix = Mix(own, _weakly(others))
        known = (m for m in reversed(self._mixes) if m.excess_bytes is not None)
        return any(mix.within(m) for m in known)

    def excess_of(self, own: int, others: Counts) -> int:
        """The largest excess counted for a mix that covers this one; 0 if there is none.

        A mix that stands for several may have its excess from another mix. So without own calls,
        the result is at most the largest excess that was counted without own calls.
        """
        mix = Mix(own, _weakly(others))
        known = (m.excess_bytes for m in self._mixes if mix.within(m))
        most = max((nbytes for nbytes in known if nbytes is not None), default=0)
        return most if own else min(most, self._beyond_first)

    def most(self, graph: PlannedGraph) -> int:
        """The most calls of another graph that were outstanding at once."""
        return self._most.get(ref(graph), 0)

    def before_first(self, graph: PlannedGraph) -> int:
        """Calls of another graph that were outstanding every time that no own call was."""
        return 0 if self._before is None else self._before.get(graph, 0)

    def count_firsts(self) -> None:
        """Count no excess for the mixes of first calls of steps: external memory is known there."""
        for mix in self._mixes:
            if not mix.own and mix.excess_bytes is None:
                mix.excess_bytes = 0
                self._known[_key(0, mix.others)] = 0

    def note(self, own: int, others: Counts, excess_bytes: int | None = None) -> bool:
        """Note the outstanding calls as a call begins or comes back; returns whether it is news."""
        mix = Mix(own, _weakly(others), excess_bytes)
        key = _key(own, mix.others)
        if key in self._known and not _more(excess_bytes, self._known[key]):
            return False
        fewer = not own and self._note_before(others)
        if not own and excess_bytes is not None:
            self._beyond_first = max(self._beyond_first, excess_bytes)
        above = [m for m in self._mixes if mix.within(m)]
        news = all(_more(excess_bytes, m.excess_bytes) for m in above)
        if news:
            self._add(mix)
        counted = [n for n in (excess_bytes, *(m.excess_bytes for m in above)) if n is not None]
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = max(counted, default=None)
        return news or fewer

    def _add(self, mix: Mix) -> None:
        """Store a mix that no stored mix surpasses, and drop those that it surpasses."""
        for each in self._mixes:
            each.forget_the_dead()
        # A mix is dropped only for one with no fewer calls of each graph.
        known = {graph: n for graph, n in self._most.items() if graph() is not None}
        self._most = known | {graph: max(n, known.get(graph, 0)) for graph, n in mix.others.items()}
        excess_bytes = mix.excess_bytes
        surpassed = [
            m for m in self._mixes if m.within(mix) and not _more(m.excess_bytes, excess_bytes)
        ]
        mix.several = any(m.several for m in surpassed)
        self._mixes = [m for m in self._mixes if m not in surpassed]
        if len(self._mixes) < MOST_MIXES:
            self._mixes.append(mix)
        else:
            self._mixes[-1].add(mix)

    def _note_before(self, others: Counts) -> bool:
        """Note outstanding calls of others without own ones; returns whether fewer than ever."""
        if self._before is None or len(self._before) < self._waited:
            self._before = WeakKeyDictionary(others)
            self._waited = len(self._before)
            return False
        fewer = {g: others.get(g, 0) for g, n in self._before.items() if others.get(g, 0) < n}
        self._before.update(fewer)
        return bool(fewer)

    def excess_bytes(self) -> int:
        """The largest excess of all mixes; 0 if none was counted."""
        counted = (mix.excess_bytes for mix in self._mixes if mix.excess_bytes is not None)
        return max(counted, default=0)

    def external_bytes(
        self,
        graph: PlannedGraph,
        calls: int,
        active: Collection[PlannedGraph],
        alone: Bytes,
        io_bytes: Bytes,
        unknown: int = 0,
    ) -> tuple[int, int]:
        """The excess that a plan for `calls` calls of `graph` needs room for, as two estimates.

        Both add what outstanding calls of other graphs alone hold: the first for the most calls of
        each graph, though they may be from different mixes; the second for the largest one mix.

        `alone`: what each outstanding call of a graph holds that nothing else does. `io_bytes`:
        what each call is given and returns; from it the excess of uncounted mixes is estimated.
        `unknown`: the excess if no mix was counted. Only `active` graphs count, and no more calls
        than graphs are planned for.
        """
        mixes = [mix for mix in self._mixes if mix.own < calls or mix.several]
        there = {each: each() for mix in mixes for each in mix.others}
        graphs = {each: g for each, g in there.items() if g is not None and g in active}
        limits = {each: g.status.planned_for for each, g in graphs.items()}
        waiting = {each: alone(g) for each, g in graphs.items()}
        counts = [
            {each: min(n, limits[each]) for each, n in mix.others.items() if each in limits}
            for mix in mixes
        ]
        counted = [(m, c) for m, c in zip(mixes, counts, strict=True) if m.excess_bytes is not None]
        known = max((mix.excess_bytes or 0 for mix, _ in counted), default=unknown)
        most_own = max((mix.own for mix, _ in counted), default=0)
        most_counted = _most_of_each(others for _, others in counted)

        def beyond(mix: Mix, others: Others) -> int:
            if mix.excess_bytes is not None or not counted:
                return known if mix.excess_bytes is None else mix.excess_bytes
            more = max(0, mix.own - most_own) * io_bytes(graph)
            for other, n in others.items():
                more += max(0, n - most_counted.get(other, 0)) * io_bytes(graphs[other])
            return known + more

        totals = [
            (beyond(mix, others), sum(n * waiting[other] for other, n in others.items()))
            for mix, others in zip(mixes, counts, strict=True)
        ]
        most = max((held for held, _ in totals), default=0)
        most += sum(n * waiting[other] for other, n in _most_of_each(counts).items())
        return most, max((held + beside for held, beside in totals), default=0)


class Observations:
    """What calls of one graph met as they began, waited and came back."""

    def __init__(self) -> None:
        self.called, self.returned = Mixes(), Mixes()
        """Mixes as calls of this graph began, and as they came back."""
        self.paused, self.paused_since = Mixes(), Mixes()
        """Mixes between calls, while one call of this graph is outstanding, which is not counted in
        the mix: in a timed step, and since there is a plan."""
        self.first_bytes: int | None = None
        """External memory as the first call of this graph began in the latest metered step, since
        it has a plan. None: there was no such step."""
        self.met: WeakKeyDictionary[PlannedGraph, int] | None = None
        """Graph -> how many of its calls had come back when the last call of this graph did: the
        fewest in any timed step. None: there was no timed step yet."""
        self.most_met: WeakKeyDictionary[PlannedGraph, int] = WeakKeyDictionary()
        """The same for the one timed step in which those calls left the most gradients."""
        self.latest_mix_uncounted = False
        """Whether the graph has a plan and its latest call met a mix that had not been counted."""
        self.unchecked = False
        """Whether the plan may have too little room: a new mix came, or a graph in a mix has
        another plan."""

    def __contains__(self, graph: PlannedGraph) -> bool:
        """Whether calls of `graph` were outstanding as calls of this one began or came back.

        If calls come back in the order in which they began, each of two graphs has seen the other.
        """
        return bool(self.called.most(graph) or self.returned.most(graph))

    def most(self, graph: PlannedGraph) -> int:
        """The most calls of another graph that were outstanding at once."""
        return max(self.called.most(graph), self.returned.most(graph))

    def meet(self, returned: Counts, gradients: Bytes) -> None:
        """Note how many calls of each graph had come back as the last one of a timed step does.

        `gradients`: the bytes of gradients that each call of a graph leaves.
        """
        before = returned if self.met is None else self.met
        self.met = WeakKeyDictionary({g: min(n, returned.get(g, 0)) for g, n in before.items()})

        def left_bytes(met: Counts) -> int:
            return sum(calls * gradients(graph) for graph, calls in met.items())

        if left_bytes(returned) > left_bytes(self.most_met):
            self.most_met = WeakKeyDictionary(returned)


def _most_of_each(mixes: Iterable[Others]) -> Others:
    """The most calls of each graph in any of the mixes."""
    most: Others = {}
    for others in mixes:
        for each, n in others.items():
            most[each] = max(n, most.get(each, 0))
    return most


def _weakly(others: Counts) -> Others:
    return {ref(graph): calls for graph, calls in others.items()}


def _key(own: int, others: Others) -> Key:
    return own, frozenset(others.items())


def _more(nbytes: int | None, than: int | None) -> bool:
    return nbytes is not None and (than is None or nbytes > than)
