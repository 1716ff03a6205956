"""Ops that may not run again: what they would make anew, something would read."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import outcore
from outcore.capture import capture
from outcore.ir.trace import Effect
from tests.cpu.training import mean_square, same, snapshot, tight_budget, train

ATEN = torch.ops.aten
WIDTH, STEPS = 192, 9
OUTSIDE_BYTES = 4 << 20
"""More than what the test itself and the optimizer hold."""


class Statistics(nn.Module):
    """Trains running statistics, reads them, and trains them again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.norm(self.layer(x)))
        mean, variance = self.norm.running_mean, self.norm.running_var
        b = torch.tanh(F.batch_norm(self.layer(a), mean, variance))
        made: Tensor = torch.tanh(self.norm(self.layer(b)))
        return made


def made() -> nn.Module:
    torch.manual_seed(0)
    return Statistics()


@pytest.mark.parametrize("fuse", [False, True])
def test_new_running_statistics_that_are_read_are_not_made_again(fuse: bool) -> None:
    """The old ones are overwritten before backward, so others would be made of them."""
    args = [torch.randn(8192, WIDTH, generator=torch.Generator().manual_seed(1))]
    options: Any = {"policy": "recompute-all", "fuse": fuse}
    budget = tight_budget(made(), args, mean_square, 0.5, **options) + OUTSIDE_BYTES

    def trained(budget: int, policy: str) -> tuple[Any, outcore.Report]:
        torch._dynamo.reset()
        module = made()
        backend = outcore.Backend(budget=budget, policy=policy, fuse=fuse, strict=True)
        call = torch.compile(module, backend=backend)
        return train(module, call, args, mean_square, STEPS), backend.report()

    expected, _ = trained(1 << 30, "keep-all")
    found, report = trained(budget, "recompute-all")
    assert report.counts is not None
    assert report.counts.recompute > 0
    assert same(found, expected)


def traced(step: Any, *given: Tensor) -> Any:
    return capture(make_fx(step)(*given), 1).trace


def test_a_number_drawn_on_the_host_is_not_drawn_again_for_another_device() -> None:
    """Reruns restore the generator of the device, not that of the host."""

    def step(x: Tensor, tangents: Tensor) -> Any:
        number = ATEN.rand.default([], device=torch.device("cpu"))
        noise = ATEN.rand.default([8, 8], device=x.device)
        scaled = x * (number * 2) + noise
        return scaled.tanh().sum(), tangents * scaled

    def drawn(device: str) -> list[bool]:
        with FakeTensorMode():
            trace = traced(step, *(torch.empty(8, 8, device=device) for _ in range(2)))
        draws = [op for op in trace.ops if op.target == "aten.rand.default"]
        return [Effect.UNREPEATABLE in op.effects for op in draws]

    assert drawn("cuda") == [True, False]
    assert drawn("cpu") == [False, False]


class Fixed(nn.Module):
    """Reads its input from a fixed place of the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.as_strided((32, 64), (64, 1), 0)).tanh()
        return made


def test_a_view_from_a_fixed_place_of_an_input_is_not_planned() -> None:
    """torch compiles no check of where the input begins."""
    whole = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))

    def losses(module: nn.Module) -> list[Tensor]:
        return [mean_square(module(whole[i * 32 : i * 32 + 32])).detach() for i in range(8)]

    torch.manual_seed(0)
    plain, module = Fixed(), Fixed()
    module.load_state_dict(plain.state_dict())
    outcore.wrap(module, budget="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(module)
    assert [w for w in caught if "as_strided with an offset, of an input" in str(w.message)]
    assert same([found], [losses(plain)])


class Scaled(torch.autograd.Function):
    """Reads gradients from a fixed place of their storage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.as_strided((4, 8), (8, 1), 0) * 2


def test_a_view_from_a_fixed_place_of_a_gradient_is_not_planned() -> None:
    class Scaling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Scaled.apply(super().forward(x))
            return made

    def trained(module: nn.Module, call: Any) -> list[list[Tensor]]:
        made = []
        for i in range(8):
            module.zero_grad()
            result = call(torch.full((4, 8), 1.0 + i))
            parts = [torch.ones(4, 8), result] if i > 4 else [result]
            loss = mean_square(torch.cat(parts))
            loss.backward()
            made.append(snapshot(module, loss))
        return made

    torch.manual_seed(0)
    plain = Scaling(8, 8)
    module = copy.deepcopy(plain)
    call = torch.compile(module, backend=outcore.Backend(budget="1GiB"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(module, call)
    assert [w for w in caught if "as_strided with an offset, of an input" in str(w.message)]
    assert same(found, trained(plain, plain))


def test_an_input_that_was_all_of_its_storage_begins_elsewhere() -> None:
    """Views of it from a fixed place do not: from then on the graph runs as torch has it."""
    whole = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    parts = [*(torch.randn(32, 64) for _ in range(6)), whole[:32].clone(), whole[64:96]]

    def trained(module: nn.Module) -> list[list[Tensor]]:
        made = []
        for x in parts:
            module.zero_grad()
            loss = mean_square(module(x))
            loss.backward()
            made.append(snapshot(module, loss))
        return made

    torch.manual_seed(0)
    plain, module = Fixed(), Fixed()
    module.load_state_dict(plain.state_dict())
    outcore.wrap(module, budget="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(module)
    assert [w for w in caught if "begins elsewhere in its storage" in str(w.message)]
    assert same(found, trained(plain))
