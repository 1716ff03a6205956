"""The planning process starts while steps are profiled: on a GPU, if `search` may be needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.ir.hardware import Tier
from outcore.ir.memory import peak
from outcore.policies import resolve
from outcore.runtime.planning import solving
from outcore.runtime.planning.solving import Solver
from tests.pure.building import dense_problem

ROOM = 1 << 10


@pytest.mark.parametrize(
    ("changed", "spare", "starts"),
    [
        ({}, -1, True),
        ({}, ROOM - 1, True),
        ({}, ROOM, False),
        ({"card": None}, -1, False),
        ({"policy": resolve("swap-all")}, -1, False),
        ({"given": SimpleNamespace(path="plans.json")}, -1, False),
    ],
    ids=["tight", "nearly tight", "all fits", "CPU", "another policy", "a file of plans"],
)
def test_the_planning_process_starts_once(
    changed: dict[str, Any], spare: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spare`: bytes of the budget beyond what it takes to keep everything."""
    started: list[bool] = []
    monkeypatch.setattr(solving, "prepare", lambda: started.append(True))
    gpu = {"card": object(), "policy": resolve("search"), "rooms": (ROOM,)}
    settings: Any = SimpleNamespace(**{**gpu, "given": SimpleNamespace(path=""), **changed})
    driver: Any = None
    solver, problem = Solver(settings, driver), dense_problem(budget_bytes=1 << 40)
    needed = peak(problem, solver.kept(problem), Tier.DEVICE).nbytes
    for _ in range(2):
        solver.prepare(replace(problem, budget_bytes=needed + spare))
    assert started == [True] * starts
