"""Wrapped models train on MONAI's MetaTensors as on plain tensors, and give back MetaTensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import handle, wrap
from tests.cpu.training import PROFILED_STEPS, same, snapshot

pytest.importorskip("monai")

from monai.data import MetaTensor, list_data_collate, set_track_meta
from monai.losses import DiceLoss
from monai.networks.nets import BasicUNet

STEPS = PROFILED_STEPS + 2


class Scores(nn.Module):
    """Results in several containers; one of them may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 1)

    def forward(self, images: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        x = images["image"]
        return {"maps": [self.first(x) * scale, self.second(x)], "scale": scale, "none": None}


def image(*, batched: bool, seed: int = 0) -> Any:
    """A batch of two images with metadata; `batched`: as MONAI's loaders make it."""
    torch.manual_seed(seed)
    affine = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0], dtype=torch.float64))
    if not batched:
        return MetaTensor(torch.rand(2, 1, 16, 16), affine=affine, meta={"name": "a"})
    each = [
        {"image": MetaTensor(torch.rand(1, 16, 16), affine=affine, meta={"name": name})}
        for name in "ab"
    ]
    return list_data_collate(each)["image"]


def told(result: Any) -> Any:
    """The class of a result, and its metadata."""
    if not isinstance(result, MetaTensor):
        return type(result)
    return type(result), result.is_batch, str(result.meta), str(result.applied_operations)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_results_and_gradients_are_those_of_the_plain_model(*, batched: bool, both: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Scores()
    plain = copy.deepcopy(module)
    wrap(module, budget="1GiB")
    for step in range(STEPS):
        seen, kinds = [], []
        for each in (module, plain):
            each.zero_grad()
            x = image(batched=batched, seed=step).requires_grad_()
            results = each({"image": x}, scale=2.0)
            first, second = results["maps"]
            kinds.append([told(first), told(second), results["scale"], results["none"]])
            loss = first.square().mean() + (second.sin().mean() if both else 0)
            loss.backward()
            assert x.grad is not None
            seen.append([*snapshot(each, loss), x.grad.clone()])
        assert kinds[0] == kinds[1]
        assert kinds[0][0][0] is MetaTensor
        assert same(
            [[*map(torch.Tensor.as_subclass, s, [Tensor] * len(s))] for s in seen[:1]],
            [[*map(torch.Tensor.as_subclass, s, [Tensor] * len(s))] for s in seen[1:]],
        )
    assert handle(module).report().graphs == 1


def test_a_network_of_monai_is_one_graph() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 16, 4))
    wrap(module, budget="1GiB")
    criterion = DiceLoss(softmax=True, to_onehot_y=True)
    x = image(batched=True)
    x = torch.nn.functional.interpolate(x, size=(32, 32))
    for _ in range(STEPS):
        criterion(module(x), (x > 0.5).float()).backward()
    report = handle(module).report()
    assert (report.graphs, report.state) == (1, "in-core")


def test_results_are_plain_where_monai_tracks_nothing() -> None:
    torch._dynamo.reset()
    module, x = Scores(), image(batched=False)
    wrap(module, budget="1GiB")
    set_track_meta(False)
    try:
        first, _ = module({"image": x})["maps"]
    finally:
        set_track_meta(True)
    assert type(first) is Tensor
    first.sum().backward()
