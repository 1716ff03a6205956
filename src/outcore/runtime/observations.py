"""observations: what was held besides a graph as its calls began, and as they came back.

Steps need not be alike: where layers are left out now and then, each step has another mix of calls
that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:  # a graph sees others
    from outcore.runtime.graph import PlannedGraph

Counts: TypeAlias = Mapping["PlannedGraph", int]
"""Graphs, and how many calls of each: that wait for their backward, or came through it."""

Bytes: TypeAlias = Callable[["PlannedGraph"], int]
"""Bytes of each call of a graph."""

Others: TypeAlias = dict[ref["PlannedGraph"], int]
"""The same, weakly."""

Key: TypeAlias = tuple[int, frozenset[tuple[ref["PlannedGraph"], int]]]
"""Own calls, and those of others."""

MOST_KNOWN = 128
"""Calls that waited at once and are known again without a look at all mixes."""

MOST_MIXES = 64
"""Mixes that are told apart; what comes after that is one, with the most of each graph, that stands
for all with no more."""


@dataclass(slots=True, eq=False)
class Mix:
    """Calls that wait at once, and what is held besides what they alone hold."""

    own: int
    """Calls of the graph itself."""
    others: Others
    beyond_bytes: int | None = None
    """How much more than as the first call of that step began; None: nobody counted."""
    several: bool = False
    """Whether it stands for all mixes with no more calls of each."""

    def within(self, other: Mix) -> bool:
        """Whether as many own calls wait as in `other`, and no more of others."""
        own = self.own <= other.own if other.several else self.own == other.own
        if not own or not self.others.keys() <= other.others.keys():
            return False
        return all(other.others[graph] >= n for graph, n in self.others.items() if n > 1)

    def forget_the_dead(self) -> None:
        """Leave out graphs that are gone."""
        for graph in [each for each in self.others if each() is None]:
            del self.others[graph]

    def add(self, other: Mix) -> None:
        """Have as many calls of each, and as much held besides, as either."""
        self.own, self.several = max(self.own, other.own), True
        for graph, calls in other.others.items():
            self.others[graph] = max(calls, self.others.get(graph, 0))
        if other.beyond_bytes is not None:
            known = other.beyond_bytes if self.beyond_bytes is None else self.beyond_bytes
            self.beyond_bytes = max(known, other.beyond_bytes)


class Mixes:
    """Those that calls of one graph met, but for those that others surpass in all."""

    def __init__(self) -> None:
        self._mixes: list[Mix] = []
        self._before: WeakKeyDictionary[PlannedGraph, int] | None = None
        """Calls of others that waited each time when no own call did. None: never so."""
        self._waited = 0
        """How many graphs are in that: fewer, where one is gone, and another in its stead."""
        self._beyond_first = 0
        """How much more was held, at most, when no own call waited."""
        self._known: dict[Key, int | None] = {}
        """What was counted beside calls that were noted before, at least: steps are alike."""

    def __iter__(self) -> Iterator[Mix]:
        """Those that are told apart."""
        return iter(self._mixes)

    def knows(self, own: int, others: Counts, *, counted: bool) -> bool:
        """Whether just those calls were noted before; `counted`: with what was held besides."""
        key = _key(own, _weakly(others))
        return key in self._known and not (counted and self._known[key] is None)

    def counted(self, own: int, others: Counts) -> bool:
        """Whether somebody counted what is held besides as many calls."""
        mix = Mix(own, _weakly(others))
        known = (m for m in reversed(self._mixes) if m.beyond_bytes is not None)
        return any(mix.within(m) for m in known)

    def beyond_of(self, own: int, others: Counts) -> int:
        """How much more was held besides, at most, where as many calls waited; 0: nobody knows.

        A mix that stands for several may have it from others: where no own call waits, no more
        than there ever was then.
        """
        mix = Mix(own, _weakly(others))
        known = (m.beyond_bytes for m in self._mixes if mix.within(m))
        most = max((nbytes for nbytes in known if nbytes is not None), default=0)
        return most if own else min(most, self._beyond_first)

    def most(self, graph: PlannedGraph) -> int:
        """The most calls of another graph that waited."""
        each = ref(graph)
        return max((mix.others.get(each, 0) for mix in self._mixes), default=0)

    def before_first(self, graph: PlannedGraph) -> int:
        """Calls of another graph that waited each time when no own call did."""
        return 0 if self._before is None else self._before.get(graph, 0)

    def note(self, own: int, others: Counts, beyond_bytes: int | None = None) -> bool:
        """Take who waited as a call began, or came back; whether that is news."""
        mix = Mix(own, _weakly(others), beyond_bytes)
        key = _key(own, mix.others)
        if key in self._known and not _more(beyond_bytes, self._known[key]):
            return False
        fewer = not own and self._note_before(others)
        if not own and beyond_bytes is not None:
            self._beyond_first = max(self._beyond_first, beyond_bytes)
        above = [m for m in self._mixes if mix.within(m)]
        news = all(_more(beyond_bytes, m.beyond_bytes) for m in above)
        if news:
            self._add(mix)
        counted = [n for n in (beyond_bytes, *(m.beyond_bytes for m in above)) if n is not None]
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = max(counted, default=None)
        return news or fewer

    def _add(self, mix: Mix) -> None:
        """Take a mix, which none surpasses."""
        for each in self._mixes:
            each.forget_the_dead()
        beyond_bytes = mix.beyond_bytes
        surpassed = [
            m for m in self._mixes if m.within(mix) and not _more(m.beyond_bytes, beyond_bytes)
        ]
        mix.several = any(m.several for m in surpassed)
        self._mixes = [m for m in self._mixes if m not in surpassed]
        if len(self._mixes) < MOST_MIXES:
            self._mixes.append(mix)
        else:
            self._mixes[-1].add(mix)

    def _note_before(self, others: Counts) -> bool:
        """Take who waited though no own call did; whether those are fewer than each time before."""
        if self._before is None or len(self._before) < self._waited:
            self._before = WeakKeyDictionary(others)
            self._waited = len(self._before)
            return False
        fewer = {g: others.get(g, 0) for g, n in self._before.items() if others.get(g, 0) < n}
        self._before.update(fewer)
        return bool(fewer)

    def beyond_bytes(self) -> int:
        """The most that was held besides, but for what calls alone hold; 0: nobody knows.

        More than as the first call of a step begins.
        """
        counted = (mix.beyond_bytes for mix in self._mixes if mix.beyond_bytes is not None)
        return max(counted, default=0)

    def external_bytes(
        self,
        graph: PlannedGraph,
        calls: int,
        active: Collection[PlannedGraph],
        alone: Bytes,
        call_tensors: Bytes,
        unknown: int = 0,
    ) -> tuple[int, int]:
        """What is held besides `calls` of `graph`: with the most of each other, and in one mix.

        More than as the first call of a step begins. `alone`: what each waiting call of a graph
        holds that nobody else does, and `handed`: what it was given and returned, by which calls
        are estimated beside which nobody counted; `unknown`: beside all, if nobody ever did. The
        `active` graphs count, and mixes of no more calls than plans are made for.
        """
        mixes = [mix for mix in self._mixes if mix.own < calls or mix.several]
        there = {g for g in (each() for mix in mixes for each in mix.others) if g is not None}
        each = {g: alone(g) for g in there if g in active}
        counted = [mix for mix in mixes if mix.beyond_bytes is not None]
        known = max((mix.beyond_bytes or 0 for mix in counted), default=unknown)

        def calls_of(mix: Mix, other: PlannedGraph) -> int:
            return min(mix.others.get(ref(other), 0), other.status.planned_for)

        def beyond(mix: Mix) -> int:
            if mix.beyond_bytes is not None or not counted:
                return known if mix.beyond_bytes is None else mix.beyond_bytes
            more = max(0, mix.own - max(m.own for m in counted)) * call_tensors(graph)
            for other in each:
                most = max(calls_of(m, other) for m in counted)
                more += max(0, calls_of(mix, other) - most) * call_tensors(other)
            return known + more

        totals = [
            (beyond(mix), sum(calls_of(mix, other) * n for other, n in each.items()))
            for mix in mixes
        ]
        most_calls = {g: max(calls_of(mix, g) for mix in mixes) for g in each}
        most = max((held for held, _ in totals), default=0)
        most += sum(calls * each[g] for g, calls in most_calls.items())
        return most, max((held + waiting for held, waiting in totals), default=0)


class Observations:
    """What calls of one graph met, as they began and as they came back."""

    def __init__(self) -> None:
        self.called, self.returned = Mixes(), Mixes()
        self.paused, self.paused_since = Mixes(), Mixes()
        """Between calls, while one of this graph waits: what is held besides that one. In a timed
        step, and since there is a plan."""
        self.first_bytes: int | None = None
        """What was held as the first call of the latest step began: with a plan, of a metered one.
        """
        self.met: WeakKeyDictionary[PlannedGraph, int] | None = None
        """Which graphs had come back when the last call of a timed step did, how often at least."""
        self.most_met: WeakKeyDictionary[PlannedGraph, int] = WeakKeyDictionary()
        """The same of the timed step with most gradients by then."""
        self.fresh = False
        """Whether the latest call met calls beside which nobody had counted; there is a plan."""
        self.unchecked = False
        """Whether the plan may have too little room: a mix came, or one in a mix has another plan.
        """

    def __contains__(self, graph: PlannedGraph) -> bool:
        """Whether calls of another graph waited.

        Where the first to be called comes back first, each of two has seen the other.
        """
        return bool(self.most(graph))

    def most(self, graph: PlannedGraph) -> int:
        """The most calls of another graph that waited."""
        return max(self.called.most(graph), self.returned.most(graph))

    def meet(self, returned: Counts, gradients: Bytes) -> None:
        """Take how often graphs had come back when the last call of a timed step does.

        `gradients`: what each call of a graph leaves then.
        """
        before = returned if self.met is None else self.met
        self.met = WeakKeyDictionary({g: min(n, returned.get(g, 0)) for g, n in before.items()})

        def left_bytes(met: Counts) -> int:
            return sum(calls * gradients(graph) for graph, calls in met.items())

        if left_bytes(returned) > left_bytes(self.most_met):
            self.most_met = WeakKeyDictionary(returned)


def _weakly(others: Counts) -> Others:
    return {ref(graph): calls for graph, calls in others.items()}


def _key(own: int, others: Others) -> Key:
    return own, frozenset(others.items())


def _more(nbytes: int | None, than: int | None) -> bool:
    return nbytes is not None and (than is None or nbytes > than)
