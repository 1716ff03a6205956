"""Which calls of other graphs waited, and what that makes of what is held."""

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


def to_come(seen: Any, resident: int, will_hold: dict[Any, int], **now: Any) -> tuple[int, ...]:
    """Of graphs that are all active."""
    found: tuple[int, ...] = seen.to_come_bytes(
        resident, now.get("now", {}), set(will_hold), will_hold.__getitem__
    )
    return found


def noted(mixes: list[dict[Any, int]], base: int | None = None) -> Any:
    seen = Seen()
    for mix in mixes:
        seen.note(mix)
    if base is not None:
        seen.note_base(base)
    return seen


def test_what_calls_will_hold_comes_on_top_of_the_rest() -> None:
    a, b = Graph(), Graph()
    seen = noted([{}, {a: 2, b: 1}], base=10)
    assert to_come(seen, 10 + 3 * 5, {a: 5, b: 5}) == (0,)
    assert to_come(seen, 10 + 3 * 5, {a: 9, b: 5}) == (8,)
    assert to_come(seen, 10 + 3 * 5, {a: 1, b: 1}) == (0,), "what was seen may come again"


def test_mixes_are_not_added_up_unless_there_is_room() -> None:
    a, b = Graph(), Graph()
    seen = noted([{a: 4, b: 1}, {a: 1, b: 3}], base=7)
    assert to_come(seen, 7, {a: 10, b: 10}) == (70, 50)


def test_what_is_held_besides_may_be_seen_with_another_mix() -> None:
    """An optimizer made its state after the step in which most calls waited."""
    a = Graph()
    seen = noted([{a: 2}], base=10)
    seen.note({a: 1})
    seen.note_base(50)
    assert to_come(seen, 55, {a: 10}) == (15,)


def test_where_nobody_looked_calls_of_now_are_among_what_is_held() -> None:
    a, b = Graph(), Graph()
    seen = noted([{a: 1, b: 2}])
    assert to_come(seen, 100, {a: 5, b: 20}, now={a: 1}) == (40,)


def test_calls_without_a_plan_are_not_counted() -> None:
    a = Graph(planned_for=2)
    seen = noted([{a: 5}], base=0)
    assert seen.most(a) == 5
    assert to_come(seen, 0, {a: 10}) == (20,)
    assert to_come(seen, 0, {}) == (0,), "nor those of graphs that run no more"


def test_more_is_held_by_now() -> None:
    a = Graph()
    seen = noted([{a: 1}], base=3)
    seen.grow(4)
    assert to_come(seen, 7, {a: 10}) == (10,)
    unknown = noted([{a: 1}])
    unknown.grow(4)
    assert unknown.base_bytes is None


def test_only_larger_mixes_are_news() -> None:
    a, b = Graph(), Graph()
    seen = noted([{a: 1}, {b: 1}])
    assert seen.wider
    seen.wider = False
    for mix in ({}, {a: 1}, {b: 1}):
        seen.note(mix)
    assert not seen.wider
    seen.note({a: 1, b: 1})
    assert seen.wider
    assert len(seen._mixes) == 1
    assert a in seen
    assert b in seen
    del b, mix
    gc.collect()
    assert to_come(seen, 0, {a: 10}) == (10,)


@pytest.mark.parametrize("more", [0, 9])
def test_what_is_beyond_many_is_counted_as_one(more: int) -> None:
    graphs = [Graph() for _ in range(MOST_MIXES + more)]
    seen = noted([{graph: 1} for graph in graphs], base=0)
    assert len(seen._mixes) == MOST_MIXES
    assert to_come(seen, 0, dict.fromkeys(graphs, 7)) == (7 * len(graphs), 7 * (1 + more))
