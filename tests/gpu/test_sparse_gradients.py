"""Embeddings with sparse gradients on a GPU: these are made of what a planned graph returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kit.modes import same_graph
from outcore import Backend
from tests.cpu.training import mean_square
from tests.gpu.training import PROFILED_STEPS, ROOMY_BYTES, tight_of

ROWS, WIDTH = 8192, 256


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, WIDTH, sparse=True)
        layers = (layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.hidden = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.hidden(self.table(rows))
        return result


def trained(backend: Any, steps: int) -> tuple[list[Tensor], Any]:
    """The gradients of the last step, sparse ones as indices and values, and the compiled call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Looking().cuda()
    call = torch.compile(module, backend=backend)
    for step in range(steps):
        module.zero_grad()
        rows = torch.randint(1024, (ROWS,), generator=torch.Generator().manual_seed(step)).cuda()
        mean_square(call(rows)).backward()
        del rows  # the indices of the gradient share its memory
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert [g.is_sparse for g in gradients].count(True) == 1
    parts = [(g._indices(), g._values()) if g.is_sparse else (g,) for g in gradients]
    return [part.cpu() for each in parts for part in each], call


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_they_are_bitwise_equal_inside_the_budget(policy: str) -> None:
    steps = PROFILED_STEPS + 3
    expected, _ = trained(same_graph, steps)
    roomy = Backend(budget=ROOMY_BYTES)
    kept = trained(roomy, PROFILED_STEPS)
    budget = tight_of(roomy, 0.6)
    del kept, roomy
    backend = Backend(budget=budget, policy=policy, strict=True)
    found, _call = trained(backend, steps)
    assert all(map(torch.equal, found, expected))
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
