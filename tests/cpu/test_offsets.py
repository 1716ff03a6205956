"""Results that start at an offset in their storage, and inputs that are parts of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import StepError
from tests.cpu.training import mean_square, same

STEPS = 7


@torch.library.custom_op("test_offsets::tail", mutates_args=())
def tail(x: Tensor) -> Tensor:
    whole = torch.full((x.shape[0] + 3, x.shape[1]), 77.0)
    whole[3:] = x * 2
    return whole[3:]


@tail.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tail.register_autograd(lambda _, gradient: gradient * 2)

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda h: torch.slice_scatter(h[2:], h[2:, :5] * 2, 1, 3, 8),
    "select": lambda h: torch.select_scatter(h[2:], h[0] * 2, 0, 1),
    "diagonal": lambda h: torch.diagonal_scatter(h[2:], h[0, :14] * 2),
    "in place": lambda h: _written(h + 0)[2:],
    "of an op of its own": lambda h: torch.ops.test_offsets.tail(h)[2:],
}


def _written(h: Tensor) -> Tensor:
    part = h[3:]
    part[1] = h[0] * 2
    part[:, 2:].mul_(2.0)
    return h


def _assigned(x: Tensor) -> Tensor:
    x = x.clone() if x.requires_grad else x + 0
    x[:, 0] = 0
    return x[:, 1:]


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "assigned": _assigned,
    "scattered": lambda x: torch.slice_scatter(x, x[:, 4:8] * 3, 1, 0, 4)[:, 1:],
    "selected": lambda x: torch.select_scatter(x, x[0] * 3, 0, 1)[1:],
}


class Around(nn.Module):
    """A linear layer between `before` and `after`, and many layers behind them."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.weight = nn.Parameter(torch.randn(32))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.first(self.before(x)))
        x = torch.tanh(x * self.weight[: x.shape[-1]])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def results(module: nn.Module, call: Any, batches: Iterator[Tensor]) -> list[list[Tensor]]:
    found = []
    for x in batches:
        module.zero_grad()
        loss = mean_square(call(x))
        loss.backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([loss.detach(), x.clone(), *gradients])
    return found


def compare(
    folder: Path, make: Callable[[], nn.Module], batches: Callable[[], Iterator[Tensor]]
) -> Backend:
    """Train with everything offloaded that may be; check for the same bits as `aot_eager`."""
    rules = folder / "rules.json"
    rules.write_text('[{"match": "*", "action": "offload"}]', encoding="ascii")
    backend = Backend(budget="1GiB", overrides=rules)
    outcomes = []
    for each in (backend, "aot_eager"):
        torch._dynamo.reset()
        module = make()
        outcomes.append(results(module, torch.compile(module, backend=each), batches()))
    assert same(*outcomes)
    return backend


@pytest.mark.parametrize("name", MADE)
def test_a_result_at_an_offset_comes_back_there(name: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Around(torch.relu, MADE[name])

    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            yield torch.randn(16, 32, generator=torch.Generator().manual_seed(step))

    backend = compare(tmp_path, make, batches)
    assert backend.report().offloaded_bytes


class Part(Around):
    """`before` makes a changed copy of the input, which is new memory in plain PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = torch.tanh(layer(torch.nn.functional.pad(x, (0, 32 - x.shape[-1]))))
        return x


@pytest.mark.parametrize("name", GIVEN)
def test_a_batch_may_be_any_part_of_a_larger_tensor(name: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Part(GIVEN[name], torch.relu)

    def batches() -> Iterator[Tensor]:
        data = torch.randn(8 * STEPS, 32, generator=torch.Generator().manual_seed(0))
        for step in range(STEPS):
            yield data[8 * step : 8 * step + 8]

    compare(tmp_path, make, batches)


class Relaid(nn.Module):
    """One gradient is not laid out as torch describes it, so the first step begins again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pad = nn.Conv2d(8, 8, 3), nn.ReflectionPad2d(1)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x * self.scale.clone() + 0) * 2
        self.scale.mul_(3.0)
        made: Tensor = self.pad(x.contiguous(memory_format=torch.channels_last))
        return made


def uneven(result: Tensor) -> Tensor:
    weights = torch.linspace(0, 1, result.numel()).view_as(result)
    return (result.square() * weights).mean()


def relaid(backend: Any, refill: bool) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Relaid()
    call = torch.compile(module, backend=backend)
    found = []
    for step in range(3):
        module.zero_grad()
        x = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(step))
        result = call(x)
        if refill:
            x.fill_(7.0)
        uneven(result).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([g.clone() for g in (*gradients, *module.buffers())])
    return found


def test_a_step_that_begins_again_has_the_buffers_of_before() -> None:
    backend = Backend(budget="1GiB")
    found = relaid(backend, refill=False)
    assert backend.engine is not None
    assert backend.engine.graphs[0].corrections, "else this tests nothing"
    assert same(found, relaid("aot_eager", refill=False))


def test_a_step_that_cannot_begin_again_says_so() -> None:
    with pytest.raises(StepError, match=r"an input of shape .* was changed in place between"):
        relaid(Backend(budget="1GiB"), refill=True)
