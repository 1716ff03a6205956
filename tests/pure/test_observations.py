"""observations: outstanding calls and external memory, and what they imply for other plans."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.runtime.graphs.external import ExternalMemory, Room
from outcore.runtime.graphs.observations import MOST_MIXES, Mixes, Observations


class Graph:
    """The attributes of a planned graph that are read here."""

    def __init__(self, planned_for: int = 9, io_bytes: int = 0) -> None:
        self.status = SimpleNamespace(planned_for=planned_for)
        self.io_bytes = io_bytes


def external(
    mixes: Any, alone: dict[Any, int], graph: Graph | None = None, unknown: int = 0, calls: int = 9
) -> tuple[int, int]:
    """`mixes.external_bytes` for a graph, with all graphs in `alone` active."""
    most, of_one = mixes.external_bytes(
        graph or Graph(), calls, set(alone), alone.__getitem__, lambda g: g.io_bytes, unknown
    )
    return most, of_one


def noted(*mixes: tuple[int, dict[Any, int], int | None]) -> Any:
    found: Any = Mixes()
    for own, others, beyond in mixes:
        found.note(own, others, beyond)
    return found


def test_each_call_that_waits_holds_something() -> None:
    a, b = Graph(), Graph()
    assert external(noted((0, {}, 0), (0, {a: 2, b: 1}, 0)), {a: 5, b: 7}) == (17, 17)
    assert external(noted((0, {}, 0)), {a: 5, b: 7}) == (0, 0)
    assert external(Mixes(), {a: 5, b: 7}) == (0, 0)


def test_mixes_are_told_from_the_most_of_each() -> None:
    a, b = Graph(), Graph()
    mixes = noted((0, {a: 4, b: 1}, 0), (0, {a: 1, b: 3}, 0))
    assert external(mixes, {a: 10, b: 10}) == (70, 50)
    mixes = noted((0, {a: 4, b: 1}, 3), (0, {a: 1, b: 3}, 20))
    assert external(mixes, {a: 10, b: 10}) == (90, 60), "with what was held beside each"


def test_what_is_held_besides_counts_for_the_mix_beside_which_it_is() -> None:
    """Gradients are held when few calls are outstanding, the inputs of calls when many are."""
    a = Graph()
    assert external(noted((0, {a: 3}, 0), (0, {a: 1}, 30)), {a: 10}) == (60, 40)


def test_calls_without_a_plan_are_not_counted() -> None:
    a = Graph(planned_for=2)
    mixes = noted((0, {a: 5}, 0))
    assert mixes.most(a) == 5
    assert external(mixes, {a: 10}) == (20, 20)
    assert external(mixes, {}) == (0, 0), "nor those of graphs that run no more"


def test_own_calls_without_a_plan_are_not_counted() -> None:
    a = Graph()
    mixes = noted((0, {a: 1}, 1), (1, {a: 2}, 40))
    assert external(mixes, {a: 10}, calls=2) == (60, 60)
    assert external(mixes, {a: 10}, calls=1) == (11, 11)


def test_what_nobody_counted_is_estimated_by_what_calls_are_handed() -> None:
    graph, a = Graph(io_bytes=1000), Graph(io_bytes=100)
    counted = (0, {a: 1}, 5)
    assert external(noted(counted, (0, {a: 1}, None)), {a: 10}, graph) == (15, 15)
    assert external(noted(counted, (0, {a: 3}, None)), {a: 10}, graph) == (235, 235)
    assert external(noted(counted, (2, {a: 1}, None)), {a: 10}, graph) == (2015, 2015)
    nobody = noted((2, {a: 1}, None))
    assert external(nobody, {a: 10}, graph, unknown=7) == (17, 17)
    assert nobody.excess_bytes() == 0
    assert noted(counted).excess_bytes() == 5


def test_only_what_is_more_is_news() -> None:
    a, b = Graph(), Graph()
    mixes: Any = noted((0, {a: 1}, None), (0, {b: 1}, None))
    for mix in ({}, {a: 1}, {b: 1}):
        assert not mixes.note(0, mix, None)
        assert not mixes.counted(0, mix)
    assert mixes.note(0, {a: 1}, 5), "nobody counted before"
    assert not mixes.note(0, {a: 1}, 5)
    assert [mixes.counted(0, mix) for mix in ({}, {a: 1}, {b: 1})] == [True, True, False]
    assert not mixes.counted(1, {}), "as many own calls never waited"
    assert mixes.note(0, {a: 1}, 6)
    assert mixes.note(0, {a: 1, b: 1}, 6)
    assert [mix.excess_bytes for mix in mixes] == [6], "the others are within"
    assert not mixes.note(0, {a: 1}, 3)
    assert mixes.note(0, {a: 1}, 7), "fewer calls, more besides"
    del b, mix
    gc.collect()
    assert external(mixes, {a: 10}) == (17, 17)


def test_seen_are_those_that_waited_at_either_end() -> None:
    a, b, c = Graph(), Graph(), Graph()
    seen: Any = Observations()
    assert seen.called.note(0, {a: 2})
    assert seen.called.note(1, {a: 3, c: 1})
    assert seen.returned.note(0, {b: 1})
    assert [g in seen for g in (a, b, c, Graph())] == [True, True, True, False]
    assert (seen.most(a), seen.most(b)) == (3, 1)
    assert (seen.called.before_first(a), seen.called.before_first(c)) == (2, 0)


@pytest.mark.parametrize("more", [0, 9])
def test_what_is_beyond_many_is_counted_as_one(more: int) -> None:
    graphs = [Graph() for _ in range(MOST_MIXES + more)]
    mixes = noted(*((0, {graph: 1}, 5) for graph in graphs))
    assert len(list(mixes)) == MOST_MIXES
    most, of_one = external(mixes, dict.fromkeys(graphs, 7))
    assert (most, of_one) == (5 + 7 * len(graphs), 5 + 7 * (1 + more))


def test_all_that_is_held_besides_is_the_most_at_either_end() -> None:
    found = ExternalMemory(base_bytes=100, lingering_bytes=7, late_bytes=20)
    assert found.room(50, 0) == Room(157, 37)
    assert found.room(0, 50) == Room(170, 0)
    assert found.room(-300, -300) == Room(0, 0)


def test_what_is_beyond_many_is_news_once() -> None:
    """Whatever the number of own calls in it."""
    mixes: Any = Mixes()
    graphs = [Graph() for _ in range(MOST_MIXES)]
    for graph in graphs:
        mixes.note(0, {graph: 1}, 5)
    a, b = Graph(), Graph()
    assert mixes.note(2, {a: 1}, 5)
    assert mixes.note(1, {b: 1}, 5)
    for own, others in ((2, {a: 1}), (1, {b: 1}), (0, {graphs[-1]: 1})):
        assert mixes.counted(own, others)
        assert not mixes.note(own, others, 5)
        assert mixes.excess_of(own, others) == 5


def test_what_is_beyond_many_counts_for_as_many_own_calls_as_it_came_with() -> None:
    """Not only if plans are made for as many own calls as the largest mix has."""
    graphs = [Graph() for _ in range(MOST_MIXES)]
    a, b = Graph(), Graph()
    mixes = noted(*((0, {graph: 1}, 5) for graph in graphs), (0, {a: 1}, 100), (3, {b: 1}, 5))
    alone = dict.fromkeys((*graphs, a, b), 7)
    _, of_one = external(mixes, alone, calls=1)
    assert of_one >= 107


def test_before_the_first_call_only_those_count_that_waited_each_time() -> None:
    """Steps differ: in those that call this graph first, nothing is outstanding before it."""
    a = Graph()
    orders: list[list[dict[Any, int]]] = [[{}, {a: 2}], [{a: 2}, {}]]
    for order in orders:
        mixes = noted(*((0, others, 0) for others in order))
        assert mixes.before_first(a) == 0
    assert noted((0, {a: 2}, 0), (0, {a: 3}, 0)).before_first(a) == 2


def test_one_that_is_compiled_anew_still_waits_each_time() -> None:
    mixes: Any = Mixes()
    before = Graph()
    mixes.note(0, {before: 1}, 0)
    del before
    gc.collect()
    anew = Graph()
    for _ in range(3):
        mixes.note(0, {anew: 1}, 0)
    assert mixes.before_first(anew) == 1


COUNTS = st.dictionaries(st.integers(0, 3), st.integers(1, 3), max_size=4)
MIXES = st.lists(st.tuples(st.integers(0, 2), COUNTS, st.none() | st.integers(0, 9)), max_size=12)


@given(MIXES, st.integers(1, 3))
def test_the_most_calls_are_those_of_any_mix(noted_mixes: Any, calls: int) -> None:
    """The room for a mix of the most calls of each graph covers all mixes that were noted."""
    graphs = [Graph(planned_for=2, io_bytes=7) for _ in range(4)]
    mixes: Any = Mixes()
    for own, others, excess in noted_mixes:
        mixes.note(own, {graphs[i]: n for i, n in others.items()}, excess)
    for i, graph in enumerate(graphs):
        seen = [others.get(i, 0) for _, others, _ in noted_mixes]
        assert mixes.most(graph) == max(seen, default=0)
    alone = {graph: 10**i for i, graph in enumerate(graphs)}
    most, of_one = external(mixes, alone, calls=calls)
    assert most >= of_one
    for own, others, excess in noted_mixes:
        if own < calls:
            waiting = sum(min(n, 2) * alone[graphs[i]] for i, n in others.items())
            assert of_one >= waiting + (excess or 0)
