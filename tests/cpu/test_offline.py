"""Traces of steps that are not run, and estimates of their time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import outcore
from outcore.errors import CaptureError
from outcore.estimate import estimate, flops
from outcore.ir.store import digest
from outcore.networks import network
from outcore.presets import preset
from tests.cpu.training import Small, batch, mean_square

IMAGES_PER_SECOND = 316
"""PoocH, Figure 17: ResNet-50 in-core, batch 128."""


def resnet(samples: int) -> outcore.Trace:
    spec = network("resnet50-v1")
    with FakeTensorMode():
        model, data = spec.build(), spec.batch(samples)
        return outcore.trace(lambda x: spec.criterion(model(x), data.targets), *data.inputs)


@pytest.fixture(scope="module")
def resnet128() -> outcore.Trace:
    return resnet(128)


def test_it_is_the_trace_that_training_captures() -> None:
    torch.manual_seed(0)
    module, backend = Small(), outcore.Backend(budget="1GiB")
    call = torch.compile(module, backend=backend)
    call(batch(0))
    assert backend.engine is not None
    captured = backend.engine.graphs[0].captured.trace
    module.zero_grad()
    assert digest(outcore.trace(module, batch(0))) == digest(captured)


def test_nothing_is_computed() -> None:
    norm = nn.BatchNorm1d(4)
    found = outcore.trace(lambda x: mean_square(norm(x)), torch.full((2, 4), 3.0))
    assert found.ops
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    assert norm.weight.grad is None


def test_a_large_batch_takes_no_memory(resnet128: outcore.Trace) -> None:
    saved = sum(b.nbytes for b in resnet128.buffers if not b.borrowed)
    assert saved > 20 << 30  # the machine may have less
    forward = sum(flops(resnet128)[: resnet128.boundary])
    assert forward / 128 == pytest.approx(7.716e9, rel=1e-3)


@pytest.mark.parametrize("machine", ["v100-pcie3", "v100-nvlink2"])
def test_estimates_are_calibrated_on_the_step_in_core(
    resnet128: outcore.Trace, machine: str
) -> None:
    found = preset(machine)
    seconds = sum(estimate(resnet128, found.hardware, found.efficiency).seconds)
    assert 128 / seconds == pytest.approx(IMAGES_PER_SECOND, rel=5e-3)


def test_a_step_in_two_graphs_is_refused() -> None:
    linear = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        torch._dynamo.graph_break()
        return mean_square(y)

    with pytest.raises(CaptureError, match="not one graph"):
        outcore.trace(step, torch.ones(2, 4))


def test_nothing_to_differentiate_is_said() -> None:
    frozen = nn.BatchNorm1d(4).requires_grad_(requires_grad=False)
    for step, x in ((torch.relu, torch.ones(3)), (frozen, torch.full((2, 4), 3.0))):
        with pytest.raises(CaptureError, match="needs a gradient"):
            outcore.trace(step, x)
    assert frozen.running_mean is not None
    assert not frozen.running_mean.any()  # nothing was run


def test_what_a_trace_cannot_hold_is_refused() -> None:
    linear = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return mean_square(linear(x).to_sparse().to_dense())

    with pytest.raises(CaptureError):
        outcore.trace(step, torch.ones(2, 4))
