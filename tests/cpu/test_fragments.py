"""Fragments: a GPU's allocator is reset if it gives memory back step after step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outcore.runtime.budget import fragments
from outcore.runtime.budget.fragments import LATEST, OFTEN, SETTLING_STEPS, Fragments
from outcore.runtime.budget.steps import Steps
from outcore.runtime.settings.options import Settings

KEPT, MOVED = (SimpleNamespace(everything_kept=kept, layout=None) for kept in (True, False))
PLACED = SimpleNamespace(everything_kept=False, layout=object())


class Machine:
    """Steps of two calls each on a fake device; records when its cache was emptied."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, kind: str = "cuda", room: int = 1
    ) -> None:
        self.retries, self.emptied, self.steps = 0, list[int](), Steps()
        settings = cast("Settings", SimpleNamespace(rooms=(0, room)))
        plans: Any = SimpleNamespace(bound_memory=lambda: self.emptied.append(self.steps.number))
        monkeypatch.setattr(fragments, "retries", lambda _: self.retries)
        self.planned: list[Any] = [KEPT, MOVED]
        registry: Any = SimpleNamespace(steps=self.steps, active=self.graphs)
        self.left, self.metered = list[int](), set[int]()
        metering: Any = SimpleNamespace(was_metered=self.metered.__contains__)

        def leave() -> None:
            self.left.append(self.steps.number)
            self.planned = [KEPT, MOVED]

        device = torch.device(kind)
        self.fragments = Fragments(settings, device, registry, metering, plans, leave)

    def graphs(self) -> list[Any]:
        return [SimpleNamespace(planned=each) for each in self.planned]

    def train(self, steps: int, retries: int, *, metered: bool = False) -> None:
        for _ in range(steps):
            for begins in (True, False):
                self.steps.call(begins=begins)
                self.fragments.called()
                if metered:
                    self.metered.add(self.steps.number)
                self.retries += retries * begins


def test_it_begins_anew_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.train(10 * SETTLING_STEPS, 3)
    first = SETTLING_STEPS + 1
    assert machine.fragments.note.startswith(f"in each of the last {10 * SETTLING_STEPS - 1} steps")
    second = first + 2 * SETTLING_STEPS + 1
    assert machine.emptied == [first, second, second + 4 * SETTLING_STEPS + 1]


def test_it_lets_what_gives_nothing_back_be(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.train(SETTLING_STEPS, 2)
    machine.train(1, 0)
    assert machine.emptied == [SETTLING_STEPS + 1], "for the steps before"
    for _ in range(50):
        machine.train(1, 2)
        machine.train(1, 0)
    assert machine.emptied == [SETTLING_STEPS + 1], "one now and then may be another's"
    assert not machine.fragments.note


def test_it_waits_for_a_plan_that_moves_something(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for planned in ([None, MOVED], [KEPT, KEPT]):
        machine.planned = planned
        machine.train(2 * SETTLING_STEPS, 3)
    assert not machine.emptied
    machine.planned = [KEPT, MOVED]
    machine.train(SETTLING_STEPS, 3)
    assert not machine.emptied
    machine.train(1, 3)
    assert machine.emptied == [5 * SETTLING_STEPS + 1]


@pytest.mark.parametrize("every", [1, 4, 8])
def test_places_that_do_not_help_are_left(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer may cause memory to be given back, once per several calls."""
    machine = Machine(monkeypatch)
    machine.planned = [None, MOVED]
    machine.train(3, 1)
    machine.planned = [PLACED]
    for step in range(OFTEN * every):
        machine.train(1, int(step % every == every - 1))
        assert not machine.left
        assert not machine.emptied
    machine.train(SETTLING_STEPS + every, 1)
    assert len(machine.left) == 1


def test_places_are_kept_where_memory_is_given_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.planned = [PLACED]
    for _ in range(20):
        machine.train(LATEST // (OFTEN - 1), 0)
        machine.train(1, 2)
    assert not machine.left
    assert not machine.emptied


def test_metered_steps_say_nothing_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held for it in them. The steps under an earlier one say nothing either."""
    machine = Machine(monkeypatch)
    for _ in range(3):
        machine.planned = [SimpleNamespace(everything_kept=False, layout=object())]
        machine.train(2, 1, metered=True)
        machine.train(SETTLING_STEPS, 1)
        machine.train(4, 0)
        machine.train(2, 1, metered=True)
        machine.train(1, 1)
        machine.train(2, 0)
    assert not machine.left
    assert not machine.emptied


@pytest.mark.parametrize(("kind", "room"), [("cpu", 1), ("cuda", 0)])
def test_it_looks_at_no_more_than_a_gpu_that_is_all_but_full(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, kind=kind, room=room)
    machine.train(40, 3)
    assert not machine.emptied
