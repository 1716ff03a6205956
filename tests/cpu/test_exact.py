"""Real models under a tight budget: same results as plain PyTorch, inside the budget."""

from __future__ import annotations

import hashlib
from functools import cache

import pytest
import torch

from outcore import Backend
from outcore.policies import POLICIES
from tests.cpu.models import CASES, Case
from tests.cpu.training import PROFILED_STEPS, snapshot, tight_budget

STEPS = PROFILED_STEPS + 1
EVERY = (*sorted(POLICIES.keys() - {"keep-all"}), "superneurons-cost-aware{cache=false}")
"""The policies that move something; with everything kept, nothing fits a tight budget."""

ROOM = dict.fromkeys(("recompute-all", "chen-sqrt", "superneurons", "vdnn-conv"), 0.8)
"""Policies that offload little: recomputing holds more at once than copying back."""


ONES = ("resnet50", "gpt2", "unet3d", "two-heads", "transformers-bert", "transformers-vit")


def fingerprint(tensors: list[torch.Tensor]) -> str:
    """A digest of all bits, because kept tensors would count against the budget."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run(case: Case, backend: Backend | str) -> list[str]:
    """The fingerprints of a few steps."""
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
        seen.append(fingerprint(snapshot(step.module, loss)))
    return seen


@cache
def plain(case: Case) -> list[str]:
    """The fingerprints without outcore."""
    return run(case, "aot_eager")


@cache
def budget_of(case: Case, share: float) -> int:
    torch.manual_seed(0)
    probe = case.make()
    return tight_budget(probe.module, probe.args, probe.loss, share)


def check(case: Case, policy: str, share: float = 0.5) -> None:
    budget = budget_of(case, share)
    backend = Backend(budget=budget, policy=policy)
    assert run(case, backend) == plain(case)
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute > 0
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


@pytest.mark.parametrize("name", ONES)
def test_real_models_under_a_plan(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    check(case, "pooch{min_bytes=1KiB,early=true}")


@pytest.mark.xdist_group("every policy")  # one process, which compiles the reference once
@pytest.mark.parametrize("policy", EVERY)
def test_every_policy(policy: str) -> None:
    case = next(c for c in CASES if c.name == "two-heads")
    options = "min_bytes=1KiB"
    spec = policy.replace("{", "{" + options + ",") if "{" in policy else f"{policy}{{{options}}}"
    check(case, spec, ROOM.get(policy, 0.55))
