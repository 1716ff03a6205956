"""Graphs do not end at `torch.jit.isinstance`, which modules call that can also be scripted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import handle, wrap
from tests.cpu.training import PROFILED_STEPS, same, snapshot


class Joined(nn.Module):
    """Joins what it is given, if that is a tensor."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.layer, self.target = nn.Linear(8, 8), target

    def forward(self, x: Tensor, other: Any) -> Tensor:
        y: Tensor = self.layer(x)
        return y + other if torch.jit.isinstance(other, self.target) else y * 2


class Network(nn.Module):
    """Blocks one after the other."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joined(target) for _ in range(3))

    def forward(self, x: Tensor, other: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, other)
        return x


@pytest.mark.parametrize(
    ("target", "other", "graphs"),
    [
        (Tensor, torch.zeros, 1),
        (Tensor, None, 1),
        (list[int], None, 3),
        ((Tensor, int), 2, 3),
    ],
)
def test_one_graph_where_the_class_is_plain(target: Any, other: Any, graphs: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = torch.ones(8) if other is torch.zeros else other
    module = Network(target)
    plain = copy.deepcopy(module)
    wrap(module, budget="1GiB")
    for _ in range(PROFILED_STEPS + 1):
        seen = []
        for each in (module, plain):
            each.zero_grad()
            loss = each(torch.linspace(0, 1, 32).view(4, 8), given).square().mean()
            loss.backward()
            seen.append(snapshot(each, loss))
        assert same(seen[:1], seen[1:])
    assert handle(module).report().graphs == graphs


def test_classes_of_containers_are_refused_as_ever() -> None:
    module = Network(list)
    wrap(module, budget="1GiB")
    with pytest.raises(RuntimeError, match="contained type"):
        module(torch.ones(4, 8), [1])
