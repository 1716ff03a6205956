"""Accelerate, and plain loops as in MONAI: outcore needs one line in each."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, same, train

accelerate = pytest.importorskip("accelerate")
monai = pytest.importorskip("monai")

from monai.inferers import SlidingWindowInferer  # noqa: E402 - where it is installed
from monai.losses import DiceLoss  # noqa: E402 - as above
from monai.networks.nets import UNet  # noqa: E402 - as above

STEPS = PROFILED_STEPS + 2
TIGHT: dict[str, Any] = {"budget": "2MiB", "policy": "swap-all"}


def small() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def accelerator() -> Any:
    before = dict(os.environ)
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def accelerated(accelerator: Any, model: nn.Module) -> list[list[Tensor]]:
    """The loop of Accelerate's own guide."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    for step in range(2 * STEPS):
        torch.manual_seed(step)
        with accelerator.accumulate(model):
            loss = mean_square(model(batch(step % 3)))
            accelerator.backward(loss)
            seen.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_accelerate(accelerator: Any) -> None:
    expected = accelerated(accelerator, small())
    model = outcore.wrap(small(), **TIGHT)
    seen = accelerated(accelerator, model)
    assert accelerator.unwrap_model(model) is model
    assert outcore.handle(model).report().state == "planned"
    assert outcore.handle(model).report().counts.offload
    assert list(accelerator.get_state_dict(model)) == list(Small().state_dict())
    assert same(seen, expected)


def test_a_batch_that_does_not_fit_is_made_smaller() -> None:
    tried: list[int] = []

    @accelerate.utils.find_executable_batch_size(
        starting_batch_size=32, reduce_batch_size_fn=lambda: tried[-1] // 2
    )
    def training(samples: int) -> outcore.Report:
        tried.append(samples)
        model = outcore.wrap(small(), **TIGHT)
        train(model, model, [batch(0, n=samples)], mean_square, STEPS)
        return outcore.handle(model).report()

    assert training().state == "planned"
    assert tried[0] == 32
    assert 4 <= tried[-1] < 32


def test_no_batch_is_looked_for_where_weights_alone_do_not_fit() -> None:
    tried: list[int] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=32)
    def training(samples: int) -> None:
        tried.append(samples)
        torch._dynamo.reset()
        model = outcore.wrap(nn.Linear(512, 512), budget="1MiB")
        train(model, model, [torch.ones(samples, 512)], mean_square, STEPS)

    with pytest.raises(outcore.InfeasibleError, match="a smaller batch does not help: parameters"):
        training()
    assert tried == [32]


def unet() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: nn.Module = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
        dropout=0.1,
    )
    return net


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_plain_loop_with_a_sliding_window() -> None:
    """Train on patches; in between, windows over a whole volume, some of them smaller."""
    volume = torch.rand(1, 1, 40, 32, 32, generator=torch.Generator().manual_seed(1))
    patch, target = volume[..., :32, :, :], (volume[..., :32, :, :] > 0.5).float()
    criterion = DiceLoss(softmax=True, to_onehot_y=True)
    inferer = SlidingWindowInferer(roi_size=(16, 16, 16), sw_batch_size=5, overlap=0.25)

    def run(net: nn.Module, call: Any) -> list[list[Tensor]]:
        seen = train(net, call, (patch,), lambda y: criterion(y, target), STEPS)
        net.eval()
        with torch.no_grad():
            seen.append([inferer(volume, net)])
        net.train()
        return [*seen, *train(net, call, (patch,), lambda y: criterion(y, target), 1)]

    plain = unet()
    expected = run(plain, torch.compile(plain, backend="aot_eager", dynamic=False))
    net = outcore.wrap(unet(), budget="10MiB", policy="swap-all", strict=True)
    seen = run(net, net)
    report = outcore.handle(net).report()
    assert report.state == "planned", report
    assert report.counts.offload, report
    assert report.graphs == 1  # windows are not trained on
    assert same(seen, expected)
