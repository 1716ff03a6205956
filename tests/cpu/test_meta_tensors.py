"""Wrapped models train on MONAI's MetaTensors as on plain tensors, and give back MetaTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")

STEPS = PROFILED_STEPS + 2


class Scores(nn.Module):
    """Results in several containers; one of them may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 1)

    def forward(self, x: Any, scale: float = 1.0) -> dict[str, Any]:
        y = self.first(x) * scale
        return {"maps": [y, self.second(x)], "again": y, "scale": scale, "none": None, "x": x}


class Pairs(nn.Module):
    """Is given two images, of which it uses the second, and a list that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, label: Any, x: Any, seen: Any = None) -> Any:
        if seen is not None:
            seen.append(label)
        return self.scores(x)


class Reads(Scores):
    """Uses metadata, or looks whether there is any."""

    def forward(self, x: Any, scale: float = 1.0) -> dict[str, Any]:
        if isinstance(x, MetaTensor):
            scale *= float(x.affine[0, 0])
        return super().forward(x, scale)


def spacing(x: Any) -> float:
    return float(x.affine[0, 0])


class Asks(Scores):
    """Uses metadata by another function."""

    def forward(self, x: Any, scale: float = 1.0) -> dict[str, Any]:
        return super().forward(x, scale * spacing(x))


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


def both(
    module: nn.Module, call: Callable[[nn.Module, Any], dict[str, Any]], *, batched: bool = False
) -> None:
    """Train a model and its wrapped copy, and compare all that they show."""
    torch._dynamo.reset()
    plain = copy.deepcopy(module)
    wrap(module, budget="1GiB")
    for step in range(STEPS):
        shown: list[Any] = []
        for each in (module, plain):
            each.zero_grad()
            x = image(batched=batched, seed=step).requires_grad_()
            results = call(each, x)
            first, second = results["maps"]
            loss = first.square().mean() + (second.sin().mean() if step % 2 else 0)
            loss.backward()
            bits = [t.as_subclass(Tensor) for t in snapshot(each, loss)]
            same_objects = results["again"] is first, results["x"] is x
            kinds = [told(first), told(second), told(loss)]
            shown.append((bits, x.grad is None, same_objects, kinds, results["scale"]))
        assert same([shown[0][0]], [shown[1][0]])
        assert shown[0][1:] == shown[1][1:]


@pytest.mark.parametrize("batched", [False, True])
def test_results_and_gradients_are_those_of_the_plain_model(*, batched: bool) -> None:
    torch.manual_seed(0)
    module = Scores()
    both(module, lambda each, x: each(x, scale=2.0), batched=batched)
    assert handle(module).report().graphs <= 2, "one for each of the losses"


@pytest.mark.parametrize("form", ["positional", "named", "list"])
def test_several_are_left_as_they_are(form: str) -> None:
    """Results have the metadata of the one that they depend on, and lists are the caller's."""
    torch.manual_seed(0)

    def call(module: nn.Module, x: Any) -> dict[str, Any]:
        label, seen = image(batched=False, seed=9), list[Any]()
        label.meta["name"] = "label"
        results: dict[str, Any]
        if form == "positional":
            results = module(label, x)
        elif form == "named":
            results = module(label=label, x=x)
        else:
            results = module(x.as_tensor(), x, seen)
            assert len(seen) == 1
        return results

    both(Pairs(), call)


def test_one_that_comes_twice_is_one() -> None:
    torch.manual_seed(0)
    both(Pairs(), lambda each, x: each(x, x))


def test_a_model_that_names_metadata_gets_it() -> None:
    torch.manual_seed(0)
    both(Reads(), lambda each, x: each(x))


def test_a_model_that_asks_for_metadata_gets_it_in_the_next_call() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Asks(), image(batched=False)
    wrap(module, budget="1GiB")
    with pytest.raises(AttributeError, match="affine") as caught:
        module(x)
    assert "Asks asks a MetaTensor for its metadata" in caught.value.__notes__[-1]
    for _ in range(2):
        assert module(x)["scale"] == 2.0


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
        first, _ = module(x)["maps"]
    finally:
        set_track_meta(True)
    assert type(first) is Tensor
    first.sum().backward()
