"""Copies of wrapped models, and models that are not wrapped any more, are plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import outcore
from tests.cpu.training import same


class Copied(nn.Module):
    """Makes shallow copies of itself, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def __copy__(self) -> Copied:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._modules = dict(self._modules)
        return made


def zeroed(layer: nn.Linear) -> nn.Linear:
    made = copy.deepcopy(layer)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def test_a_copy_of_all_attributes_runs_itself() -> None:
    model = outcore.wrap(Copied(), budget="1GiB")
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    copied = copy.copy(model)
    copied.layer = zeroed(model.layer)
    result = copied(torch.ones(2, 4))
    assert torch.equal(result, torch.zeros(2, 4))
    result.sum().backward()
    assert copied.layer.weight.grad is not None
    assert model.layer.weight.grad is None
    assert outcore.handle(model).engine.steps.calls == 1


def test_a_copy_in_a_wrapped_model_runs_itself() -> None:
    """The wrapped model around it is called, too, and it is not the copy."""
    first = outcore.wrap(Copied(), budget="1GiB")
    copied = copy.copy(first)
    copied.layer = zeroed(first.layer)
    both = outcore.wrap(nn.Sequential(nn.Linear(4, 4), copied), budget="1GiB")
    assert torch.equal(both(torch.ones(2, 4)), torch.zeros(2, 4))
    with torch.no_grad():
        assert torch.equal(both(torch.ones(2, 4)), torch.zeros(2, 4))


def test_a_replica_runs_itself() -> None:
    model = outcore.wrap(Copied(), budget="1GiB")
    replica: Any = model._replicate_for_data_parallel()
    replica.layer = zeroed(model.layer)
    assert torch.equal(replica(torch.ones(2, 4)), torch.zeros(2, 4))


def test_a_model_that_is_not_wrapped_any_more_can_be_scripted() -> None:
    model = outcore.wrap(Copied(), budget="1GiB")
    before = set(vars(Copied()))
    model(torch.ones(2, 4)).sum().backward()
    outcore.unwrap(model)
    assert set(vars(model)) == before
    torch.jit.script(model)
    with outcore.session(budget="1GiB") as session:
        session.wrap(model)(torch.ones(2, 4)).sum().backward()
    assert set(vars(model)) - {"__overloads__"} == before


def test_lazy_layers_get_the_parameters_that_they_get_in_plain_pytorch() -> None:
    """While torch compiles, it would make all of them before the numbers of dropout are drawn."""
    found: list[list[Tensor]] = []
    for wrapped in (False, True):
        model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.LazyLinear(4))
        if wrapped:
            outcore.wrap(model, budget="1GiB", strict=True)
        torch.manual_seed(1)
        results = [model(torch.ones(3, 5)) for _ in range(2)]
        results[1].sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*results, *model.parameters(), *grads, torch.rand(1)])
        if wrapped:
            assert outcore.handle(model).engine.steps.calls == 1
    assert same([found[0]], [found[1]])


class Unused(Copied):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.LazyLinear(4)


def test_a_lazy_layer_that_is_never_called_leaves_the_rest_planned() -> None:
    model = outcore.wrap(Unused(), budget="1GiB", strict=True)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    assert outcore.handle(model).engine.steps.calls == 2
