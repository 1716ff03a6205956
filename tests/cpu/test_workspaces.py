"""Once a checked step has shown workspaces that nobody knew, profiled steps have room for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import InfeasibleError
from outcore.measure import resident_bytes
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.step.visit import Visit
from tests.cpu.test_lending import noted_peaks
from tests.cpu.training import PROFILED_STEPS

MAP = 512 << 10
"""Bytes of each map."""
MAPS = 8
COPIES = 6
"""What `scarce` needs beside its input, in maps."""


@torch.library.custom_op("test_workspaces::scarce", mutates_args=())
def scarce(x: Tensor) -> Tensor:
    """Double `x`, with a temporary tensor that is much larger."""
    return x.repeat(COPIES, 1)[: x.shape[0]] * 2


@scarce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_: Any, gradient: Tensor) -> Tensor:
    return gradient * 2


scarce.register_autograd(_backward)


class Around(nn.Module):
    """Maps that backward does not need, made before `scarce` and used after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(1) for _ in range(MAPS))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x * scale for scale in self.scales]
        y = scarce(x + sum(each.mean() for each in maps))
        for each in maps:
            y = y + each
        loss: Tensor = y.mean()
        return loss


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """For each metered step of a graph, whether it was checked, and its peak."""

    def is_checked(graph: PlannedGraph, visit: Visit) -> bool:
        return graph.profiling is not None and visit.ran is graph.profiling.checked

    return noted_peaks(monkeypatch, is_checked)


def steps(call: Any, module: nn.Module, number: int) -> list[Tensor]:
    """The gradients of so many steps."""
    found = []
    for n in range(number):
        module.zero_grad()
        call(torch.full((256, MAP // 1024), 0.25 + n)).backward()
        found += [p.grad for p in module.parameters() if p.grad is not None]
    return found


def backend_of(maps: int) -> Backend:
    budget = maps * MAP + resident_bytes(torch.device("cpu"))
    return Backend(budget=budget, strict=True)


@pytest.mark.parametrize("maps", [10, 12, 15])
def test_steps_after_the_first_are_within_the_budget(
    maps: int, peaks: list[tuple[bool, int]]
) -> None:
    torch.manual_seed(0)
    module, backend = Around(), backend_of(maps)
    plain = copy.deepcopy(module)
    seen = steps(torch.compile(module, backend=backend), module, PROFILED_STEPS + 2)
    assert all(map(torch.equal, seen, steps(plain, plain, PROFILED_STEPS + 2)))
    checked, *timed = peaks
    assert checked[0]
    assert maps == 10 or checked[1] > maps * MAP, "the first step is one that needs more"
    assert timed
    assert not any(again for again, _ in timed), "what the first has shown is taken over"
    assert max(peak for _, peak in timed) <= maps * MAP
    assert backend.report().state == "planned"


def test_the_second_step_tells_if_nothing_fits(peaks: list[tuple[bool, int]]) -> None:
    module, backend = Around(), backend_of(COPIES + 2)
    call = torch.compile(module, backend=backend)
    steps(call, module, 1)
    with pytest.raises(InfeasibleError) as caught:
        steps(call, module, 1)
    assert "scarce" in str(caught.value)
    assert len(peaks) == 1
