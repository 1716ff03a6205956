"""fragments: a GPU's allocator begins anew where it gives memory back step after step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outcore.runtime import fragments
from outcore.runtime.fragments import SETTLING_STEPS, Fragments
from outcore.runtime.options import Settings
from outcore.runtime.plans import Plans
from outcore.runtime.steps import Steps


class Machine:
    """Steps of two calls each on a device that counts, and how often its cache was emptied."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, kind: str = "cuda", room: int = 1
    ) -> None:
        self.retries, self.emptied, self.steps = 0, list[int](), Steps()
        settings = cast("Settings", SimpleNamespace(rooms=(0, room)))
        plans: Any = SimpleNamespace(bound_memory=lambda: self.emptied.append(self.steps.number))
        monkeypatch.setattr(fragments, "retries", lambda _: self.retries)
        self.fragments = Fragments(settings, torch.device(kind), self.steps, cast("Plans", plans))

    def train(self, steps: int, retries: int) -> None:
        for _ in range(steps):
            for begins in (True, False):
                self.steps.call(begins=begins)
                self.fragments.called()
                self.retries += retries * begins


def test_it_begins_anew_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.train(40, 3)
    first = SETTLING_STEPS + 1
    second = first + 2 * SETTLING_STEPS + 1
    assert machine.emptied == [first, second, second + 4 * SETTLING_STEPS + 1]


def test_it_lets_what_gives_nothing_back_be(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.train(SETTLING_STEPS, 2)
    machine.train(1, 0)
    assert machine.emptied == [SETTLING_STEPS + 1], "for the step before"
    machine.train(100, 0)
    assert machine.emptied == [SETTLING_STEPS + 1]


@pytest.mark.parametrize(("kind", "room"), [("cpu", 1), ("cuda", 0)])
def test_it_looks_at_no_more_than_a_gpu_that_is_all_but_full(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, kind=kind, room=room)
    machine.train(40, 3)
    assert not machine.emptied
