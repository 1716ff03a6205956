"""Real models under a tight budget: the results of plain PyTorch, inside the budget."""

from __future__ import annotations

import pytest
import torch

from outcore import Backend
from tests.cpu.models import CASES, Case
from tests.cpu.training import PROFILED_STEPS, same, snapshot, tight_budget

STEPS = PROFILED_STEPS + 1
EVERY = ("swap-all", "swap-all-naive", "recompute-all{max_ops=12,stay=true}", "swap-opt", "pooch")


def run(case: Case, backend: Backend | str) -> list[list[torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = case.make()
    call = torch.compile(step.module, backend=backend)
    seen = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        step.module.zero_grad()
        loss = step.loss(call(*step.args))
        loss.backward()
        seen.append(snapshot(step.module, loss))
    return seen


def check(case: Case, policy: str) -> None:
    torch.manual_seed(0)
    probe = case.make()
    budget = tight_budget(probe.module, probe.args, probe.loss, 0.5)
    del probe
    backend = Backend(budget=budget, policy=policy)
    assert same(run(case, backend), run(case, "aot_eager"))
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute > 0
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_model_under_the_default_policy(case: Case) -> None:
    check(case, "pooch{min_bytes=1KiB,early=true}")


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("name", ["two-heads", "gpt2"])
def test_every_policy(name: str, policy: str) -> None:
    case = next(c for c in CASES if c.name == name)
    options = "min_bytes=1KiB"
    spec = policy.replace("{", "{" + options + ",") if "{" in policy else f"{policy}{{{options}}}"
    check(case, spec)
