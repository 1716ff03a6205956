"""Which calls of other graphs waited, and what such calls may hold."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.runtime.seen import MOST_MIXES, Seen


class Graph:
    """What `Seen` asks of one."""

    def __init__(self, planned_for: int = 9) -> None:
        self.standing = SimpleNamespace(planned_for=planned_for)


def waiting(seen: Any, will_hold: dict[Any, int]) -> tuple[int, int]:
    """Of graphs that are all active."""
    most, of_one = seen.waiting_bytes(set(will_hold), will_hold.__getitem__)
    return most, of_one


def noted(mixes: list[dict[Any, int]]) -> Any:
    seen = Seen()
    for mix in mixes:
        seen.note(mix)
    return seen


def test_each_call_that_waits_holds_something() -> None:
    a, b = Graph(), Graph()
    assert waiting(noted([{}, {a: 2, b: 1}]), {a: 5, b: 7}) == (17, 17)
    assert waiting(noted([{}]), {a: 5, b: 7}) == (0, 0)


def test_mixes_are_told_from_the_most_of_each() -> None:
    a, b = Graph(), Graph()
    assert waiting(noted([{a: 4, b: 1}, {a: 1, b: 3}]), {a: 10, b: 10}) == (70, 50)


def test_calls_without_a_plan_are_not_counted() -> None:
    a = Graph(planned_for=2)
    seen = noted([{a: 5}])
    assert seen.most(a) == 5
    assert waiting(seen, {a: 10}) == (20, 20)
    assert waiting(seen, {}) == (0, 0), "nor those of graphs that run no more"


def test_only_larger_mixes_are_news() -> None:
    a, b = Graph(), Graph()
    seen = noted([{a: 1}, {b: 1}])
    assert seen.unchecked
    seen.unchecked = False
    for mix in ({}, {a: 1}, {b: 1}):
        seen.note(mix)
    assert not seen.unchecked
    seen.note({a: 1, b: 1})
    assert seen.unchecked
    assert len(seen._mixes) == 1
    assert a in seen
    assert b in seen
    del b, mix
    gc.collect()
    assert waiting(seen, {a: 10}) == (10, 10)


@pytest.mark.parametrize("more", [0, 9])
def test_what_is_beyond_many_is_counted_as_one(more: int) -> None:
    graphs = [Graph() for _ in range(MOST_MIXES + more)]
    seen = noted([{graph: 1} for graph in graphs])
    assert len(seen._mixes) == MOST_MIXES
    assert waiting(seen, dict.fromkeys(graphs, 7)) == (7 * len(graphs), 7 * (1 + more))
