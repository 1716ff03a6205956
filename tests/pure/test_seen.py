"""Which calls of other graphs waited, and what that makes of what is held."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.runtime.seen import MOST_SEEN, Seen


class Graph:
    """What `Seen` asks of one."""

    def __init__(self, planned_for: int = 9) -> None:
        self.standing = SimpleNamespace(planned_for=planned_for)


def to_come(seen: Seen, will_hold: dict[Graph, int], **given: Any) -> int:
    """Of graphs that are all active, and in turn unless that is `given`."""
    now, in_turn = given.get("now", {}), given.get("in_turn", set(will_hold))
    return seen.to_come_bytes(now, set(will_hold), in_turn, will_hold.__getitem__)  # type: ignore[arg-type]  # graphs that are stood in for


def note(seen: Seen, mix: dict[Any, int], holding: int, resident: int) -> None:
    seen.note(mix)
    seen.note_resident(mix, dict.fromkeys(mix, holding), resident)


def test_what_was_held_with_all_that_waits_is_all() -> None:
    a, b, seen = Graph(), Graph(), Seen()
    note(seen, {}, 0, 10)
    note(seen, {a: 2, b: 1}, 5, 10 + 3 * 5)
    assert to_come(seen, {a: 5, b: 5}) == 0
    assert to_come(seen, {a: 4, b: 5}) == 0, "who will hold less may yet hold what was seen"


def test_those_in_turn_come_to_hold_more() -> None:
    a, b, seen = Graph(), Graph(), Seen()
    note(seen, {a: 2, b: 1}, 5, 25)
    assert to_come(seen, {a: 9, b: 5}) == 2 * 4
    assert to_come(seen, {a: 9, b: 5}, in_turn={b}) == 0, "it has its plan by now"


def test_mixes_are_not_added_up() -> None:
    """Either many calls of the one wait, or of the other: never both."""
    a, b, seen = Graph(), Graph(), Seen()
    seen.note({a: 4, b: 1})  # type: ignore[dict-item]  # as above
    seen.note({a: 1, b: 3})  # type: ignore[dict-item]  # as above
    assert to_come(seen, {a: 10, b: 10}) == 50
    note(seen, {}, 0, 7)
    assert to_come(seen, {a: 10, b: 10}) == 50


def test_what_was_not_profiled_counts_from_the_nearest_that_was() -> None:
    a, b, seen = Graph(), Graph(), Seen()
    note(seen, {}, 0, 10)
    note(seen, {a: 1}, 5, 15)
    seen.note({a: 1, b: 2})  # type: ignore[dict-item]  # a backward call, say
    assert to_come(seen, {a: 5, b: 20}) == 40
    assert to_come(seen, {a: 8, b: 20}) == 43


def test_calls_without_a_plan_are_not_counted() -> None:
    a, seen = Graph(planned_for=2), Seen()
    seen.note({a: 5})  # type: ignore[dict-item]  # as above
    assert to_come(seen, {a: 10}) == 20
    assert to_come(seen, {a: 10}, now={a: 1}) == 10
    assert to_come(seen, {}) == 0, "nor those of graphs that run no more"


def test_it_is_profiled_anew() -> None:
    a, seen = Graph(), Seen()
    note(seen, {a: 1}, 5, 100)
    seen.forget_residents()
    note(seen, {}, 0, 10)
    assert to_come(seen, {a: 5}) == 5


def test_smaller_mixes_are_forgotten_and_so_are_graphs_that_are_gone() -> None:
    a, b, seen = Graph(), Graph(), Seen()
    seen.note({a: 1})  # type: ignore[dict-item]  # as above
    seen.note({a: 2, b: 1})  # type: ignore[dict-item]  # as above
    seen.note({b: 1})  # type: ignore[dict-item]  # as above
    assert len(seen._mixes) == 1
    assert a in seen  # type: ignore[operator]  # as above
    assert b in seen  # type: ignore[operator]  # as above
    del b
    gc.collect()
    assert to_come(seen, {a: 10}) == 20


@pytest.mark.parametrize("more", [0, 9])
def test_what_is_beyond_many_is_counted_as_one(more: int) -> None:
    graphs, seen = [Graph() for _ in range(MOST_SEEN + more)], Seen()
    for graph in graphs:
        note(seen, {graph: 1}, 5, 6)
    assert len(seen._mixes) == len(seen._sights) == MOST_SEEN
    will_hold = dict.fromkeys(graphs, 7)
    # One of the first holds 2 more; of the last ones it is not known what they held.
    assert to_come(seen, will_hold) == (2 if not more else (1 + more) * 7)
