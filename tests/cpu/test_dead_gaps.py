"""Executing plans that hold dead buffers for recomputations: results are bitwise equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from outcore import Backend
from outcore.ir.hardware import Tier
from outcore.ir.liveness import crossing_gaps, dead_gaps
from outcore.ir.plan import KEEP, Choice, Gap, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.trace import Op
from outcore.policies.candidates import recomputable
from outcore.policies.settle import settle
from tests.cpu.training import PROFILED_STEPS, batch, mean_square, same, tight_budget, train

AWAY = Offload(Tier.DISK)
STAY = Recompute(stay=True)


class Dense(nn.Module):
    """Layers that each read one concatenation of all earlier outputs."""

    def __init__(self, layers: int = 5, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(layers))
        self.layers = nn.ModuleList(
            nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            outputs.append(layer(torch.relu(norm(torch.cat(outputs, 1)))))
        return torch.cat(outputs, 1).mean((2, 3))


@dataclass(frozen=True)
class Holding:
    """Recomputes all concatenations, with `choice` for the parts that they are made of."""

    choice: Choice
    name: ClassVar[str] = "holding"
    summary: ClassVar[str] = "makes concatenations again"

    def plan(self, problem: Problem) -> Plan:
        trace = problem.trace
        crossing = crossing_gaps(trace)
        again = recomputable(problem, crossing)
        made_by = {b: op.id for op in trace.ops for b in trace.writes[op.id] if _is_cat(op)}
        cats = [g for g in crossing if g in again and g.buffer in made_by]
        assert cats
        parts = {part for g in cats for part in trace.reads[made_by[g.buffer]]}
        held = [g for g in dead_gaps(trace) if g.buffer in parts]
        assert held
        choices: dict[Gap, Choice] = {
            **dict.fromkeys(cats, Recompute()),
            **dict.fromkeys(held, self.choice),
        }
        return settle(problem, choices, self)


def _is_cat(op: Op) -> bool:
    return op.target == "aten.cat.default"


def steps(backend: Backend | str) -> list[list[torch.Tensor]]:
    """Loss, gradients and buffers of some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Dense()
    call = torch.compile(module, backend=backend)
    return train(module, call, [batch(0)], mean_square, PROFILED_STEPS + 1)


@pytest.mark.parametrize("choice", [KEEP, AWAY, STAY], ids=["keep", "offload", "stay"])
def test_the_same_bits_inside_what_was_predicted(choice):
    torch.manual_seed(0)
    budget = tight_budget(Dense(), [batch(0)], mean_square, 0.9)
    backend = Backend(budget=budget, policy=Holding(choice), strict=True)
    assert same(steps(backend), steps("aot_eager"))
    report = backend.report()
    (step,) = report.steps
    assert {c for g, c in step.plan.choices if g.dead} == {choice}
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes
