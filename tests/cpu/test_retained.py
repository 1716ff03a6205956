"""Losses that are differentiated one after the other (`retain_graph`), and what is predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.ir.margin import margin_bytes
from outcore.measure import Reading, resident_bytes
from outcore.runtime.graphs import shown
from outcore.runtime.step.visit import Wait
from tests.cpu.training import PROFILED_STEPS

BUDGET = 1 << 30
WIDTH, LAYERS = 128, 8


class Heads(nn.Module):
    """Several losses from one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        for layer in self.body:
            x = torch.relu(layer(x))
        return [head(x).square().mean() for head in self.heads]


def one_by_one(module: nn.Module, losses: list[Tensor]) -> None:
    """Add up the gradients of all losses."""
    module.zero_grad()
    while losses:
        losses.pop().backward(retain_graph=bool(losses))


def apart(module: nn.Module, losses: list[Tensor]) -> None:
    """As to weigh them against each other: copies of the gradients of each loss."""
    module.zero_grad()
    found = []
    while losses:
        losses.pop().backward(retain_graph=bool(losses))
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        module.zero_grad()


def asked(module: nn.Module, losses: list[Tensor]) -> None:
    """The gradients of each loss, which no parameter gets."""
    parameters, found = list(module.parameters()), []
    while losses:
        again = bool(losses[1:])
        found.append(
            torch.autograd.grad(losses.pop(), parameters, retain_graph=again, allow_unused=True)
        )


def peaks(
    differentiate: Callable[[nn.Module, list[Tensor]], None], rows: int, budget: int, policy: str
) -> tuple[int, int]:
    """The measured and the predicted peak, the latter without the margin, beyond what was there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    before = resident_bytes(torch.device("cpu"))
    module, backend = Heads(), Backend(budget=before + budget, policy=policy, strict=True)
    call = torch.compile(module, backend=backend)
    x = torch.rand(rows, WIDTH)
    for _ in range(PROFILED_STEPS + 3):
        differentiate(module, call(x))
        module.zero_grad()
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= before + budget
    predicted = report.predicted_peak_bytes - margin_bytes(before + budget)
    return report.measured_peak_bytes - before, predicted - before


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_stays_and_gradients_count_once(rows: int) -> None:
    """Neither earlier backward calls nor their gradients count as held outside the graph."""
    measured, predicted = peaks(one_by_one, rows, BUDGET, "keep-all")
    assert measured <= predicted <= 1.02 * measured


@pytest.mark.parametrize(
    ("differentiate", "policy"),
    [(one_by_one, "swap-all"), (apart, "recompute-all"), (asked, "pooch")],
)
def test_all_of_it_is_inside_the_budget(
    differentiate: Callable[[nn.Module, list[Tensor]], None], policy: str
) -> None:
    in_core, _ = peaks(differentiate, 2048, BUDGET, "keep-all")
    peaks(differentiate, 2048, in_core * 9 // 10, policy)


def test_what_is_moved_away_in_the_first_wait_is_still_away_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 bytes, 60 are moved away. In the second wait, the caller keeps 30 more."""
    monkeypatch.setattr(shown, "tangent_bytes", lambda _: 0)
    monkeypatch.setattr(shown, "gradient_bytes", lambda _: 0)
    reading: Any = Reading((5, 15, 30), (100, -60, 30))
    waits = [Wait(10, 20, 60), Wait(25, 40, 60)]
    visit: Any = SimpleNamespace(forward_stop=10, waits=waits)
    trace: Any = None
    waiting = shown.Waiting()
    waiting.metered(reading, visit, trace)
    assert waiting.lingering_bytes == 30
