"""Precisions, memory layouts and cuDNN's modes on a GPU: equal gradients inside the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outcore import Backend
from tests.cpu.training import mean_square, same
from tests.gpu.training import PLAIN, PROFILED_STEPS, Way

STEPS = PROFILED_STEPS + 3


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def check(way: Way, policy: str) -> None:
    expected = way.reference(STEPS)
    budget = way.tight()
    backend = Backend(budget=budget, policy=policy)
    seen, *_ = way.train(backend, STEPS)
    report = backend.report()
    assert same(seen, expected)
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all", "pooch{early=true}"])
@pytest.mark.parametrize(
    "way",
    [
        Way(layout=torch.channels_last),
        Way(autocast=torch.bfloat16),
        Way(autocast=torch.float16),
        Way(layout=torch.channels_last, autocast=torch.bfloat16),
    ],
    ids=["channels_last", "bf16", "fp16", "channels_last-bf16"],
)
def test_layouts_and_precisions(way: Way, policy: str) -> None:
    check(way, policy)


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_tf32(policy: str) -> None:
    with tf32():
        check(PLAIN, policy)


@pytest.mark.parametrize("policy", ["swap-all", "pooch{early=true}"])
def test_cudnn_tries_its_algorithms_out(policy: str) -> None:
    """It does so once per shape and thread: the reference runs first, the others use its picks."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        check(PLAIN, policy)


def test_dropout_under_a_checkpoint_of_the_user() -> None:
    """On a GPU, torch would make both calls of such a graph take random generators."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2))
            self.blocks = nn.ModuleList(nn.Sequential(*parts) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def run(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Checkpointed().cuda()
        call = torch.compile(module, backend=backend)
        data = torch.randn(256, 64, device="cuda")
        for step in range(STEPS):
            torch.manual_seed(step)
            module.zero_grad()
            mean_square(call(data)).backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    backend = Backend(budget="200MiB")
    assert same([run(backend)], [run("eager")])
    assert backend.report().state in ("in-core", "planned")
