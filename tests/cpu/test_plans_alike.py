"""Graphs with the same trace, each with a separate plan in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore import Backend
from outcore.ir.plan import make_plan
from outcore.ir.store import digest
from outcore.planfile import load_plans, make_file, save_plans, saved_plan
from outcore.policies import resolve
from outcore.runtime.graphs.planned import Planned
from tests.cpu.training import PROFILED_STEPS

ROOMY = "1GiB"


class Named(nn.Module):
    """dynamo guards on `name`, so each is compiled separately; traces differ in names only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.relu(getattr(self, self.name)(x))
        return x


def planned(**options: Any) -> tuple[list[Planned], Backend]:
    """Train two graphs with the same trace; return their plans, and the backend."""
    torch._dynamo.reset()
    backend = Backend(budget=ROOMY, **options)
    calls = [torch.compile(Named(name), backend=backend) for name in ("one", "other")]
    for _ in range(PROFILED_STEPS + 3):
        torch.stack([call(torch.ones(512, 64)).sum() for call in calls]).sum().backward()
    assert backend.engine is not None
    found = [graph.planned for graph in backend.engine.registry.active()]
    return [each for each in found if each is not None], backend


def test_each_takes_its_own(tmp_path: Path) -> None:
    made, backend = planned()
    first, second = (each.problem.trace for each in made)
    assert first != second
    assert digest(first) == digest(second)
    problem = made[0].problem
    plans = [make_plan({}), resolve("swap-all{min_bytes=1B}").plan(problem)]
    assert plans[1].choices
    backend.save_plans(tmp_path / "saved.json")
    versions = load_plans(tmp_path / "saved.json").versions
    save_plans(make_file([saved_plan(problem, p) for p in plans], versions), tmp_path / "two.json")
    again, _ = planned(plan=str(tmp_path / "two.json"))
    assert [each.plan.choices for each in again] == [plan.choices for plan in plans]
