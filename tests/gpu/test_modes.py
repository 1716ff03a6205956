"""The ways people train on a GPU: precision, layout, cuDNN's modes. Same gradients, same budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outcore import Backend
from tests.cpu.training import same
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
    """It does once for each shape and thread: the reference is first, the others have its picks."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        check(PLAIN, policy)
