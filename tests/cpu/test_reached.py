"""Parameters that backward does not reach have no gradient, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore import Backend
from outcore.errors import CaptureError
from outcore.ir.trace import Buffer, Op, Phase, Ref, Role, Trace, Value
from outcore.runtime.reached import unreached
from tests.cpu.training import PROFILED_STEPS

WIDTH = 32
STEPS = PROFILED_STEPS + 4
MIB = 1 << 20


class Heads(nn.Module):
    """A trunk with batch norm, whose buffers are results of the graph, too, and three heads."""

    def __init__(self, ends: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.ends = ends

    def forward(self, x: Tensor) -> list[Any]:
        trunk = self.trunk(x)
        return [self.ends(torch.sin(head(trunk))) for head in self.heads]


def used(step: int) -> Sequence[int]:
    """The heads whose results get gradients: they differ from step to step."""
    return [(0, 1, 2), (0, 1), (2,), (1, 2)][step % 4]


def train(module: nn.Module, call: Any, rows: Callable[[int], int] = lambda _: 64) -> list[Any]:
    """For each step: the losses, which parameters have a gradient, and what AdamW made of them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        results = call(torch.randn(rows(step), WIDTH))
        loss = torch.stack([results[i].square().mean() for i in used(step)]).sum()
        loss.backward()
        seen.append([loss.item(), [p.grad is None for p in module.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in module.parameters()])
    return seen


def alike(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        all(map(torch.equal, a, b)) if isinstance(a[0], Tensor) else a == b for a, b in pairs
    )


def both(
    module: nn.Module, rows: Callable[[int], int] = lambda _: 64, **options: Any
) -> tuple[list[Any], list[Any]]:
    torch._dynamo.reset()
    wrapped = copy.deepcopy(module)
    expected = train(module, module, rows)
    outcore.wrap(wrapped, strict=True, **options)
    return train(wrapped, wrapped, rows), expected


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_heads_that_a_step_does_not_use_have_no_gradient(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.runtime.planning.solving.fits", lambda *_: False)
    found, expected = both(Heads(), budget="1GiB", policy=policy)
    assert alike(found, expected)


def test_with_sizes_that_change() -> None:
    found, expected = both(Heads(), lambda step: 16 + 8 * step, budget="1GiB")
    assert alike(found, expected)


@pytest.mark.parametrize(
    "ends",
    [lambda x: x.view(-1), lambda x: x[:8].t(), lambda x: x.add_(1), lambda x: x.to(torch.cfloat)],
)
def test_whatever_the_results_are(ends: Callable[[Tensor], Any]) -> None:
    found, expected = both(Heads(lambda x: ends(x).abs()), budget="1GiB")
    assert alike(found, expected)


class Broken(Heads):
    """Each head is a graph by itself."""

    def forward(self, x: Tensor) -> list[Any]:
        trunk, results = self.trunk(x), []
        for head in self.heads:
            torch._dynamo.graph_break()
            results.append(torch.sin(head(trunk * 2)))
        return results


def test_through_several_graphs() -> None:
    torch._dynamo.reset()
    module = Broken()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB")
    assert alike(train(wrapped, wrapped), train(module, module))


def test_in_a_graph_that_runs_in_core() -> None:
    torch._dynamo.reset()
    module = Heads()
    wrapped, backend = copy.deepcopy(module), Backend(budget="1GiB")
    call = torch.compile(wrapped, backend=backend)
    call(torch.randn(8, WIDTH))
    assert backend.engine is not None
    with pytest.warns(UserWarning, match="by the test"):
        backend.engine.graphs[0].give_up(CaptureError(reason="by the test"))
    wrapped.load_state_dict(module.state_dict())
    assert alike(train(wrapped, call), train(module, module))


def test_several_backward_calls() -> None:
    torch._dynamo.reset()
    module = Heads()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    x = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        found = []
        for each in (module, wrapped):
            each.zero_grad()
            results = each(x)
            for i in (2, 0):
                results[i].sum().backward(retain_graph=i == 2)
                found.append(
                    [None if p.grad is None else p.grad.clone() for p in each.parameters()]
                )
        for ours, plain in zip(found[2:], found[:2], strict=True):
            for a, b in zip(ours, plain, strict=True):
                if a is None or b is None:
                    assert a is b
                else:
                    assert torch.equal(a, b)


def test_an_input_without_a_gradient_is_told() -> None:
    module = outcore.wrap(Heads(), budget="1GiB", strict=True)
    results = module(torch.randn(8, WIDTH))
    weights = [head.weight for head in module.heads if isinstance(head, nn.Linear)]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(results[0].sum(), weights)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 8, sparse=True) for _ in range(2))

    def forward(self, indices: Tensor) -> list[Tensor]:
        return [table(indices).tanh() for table in self.tables]


def test_sparse_gradients() -> None:
    torch._dynamo.reset()
    module = Tables()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    indices = torch.arange(16)
    for step in range(STEPS):
        for each in (module, wrapped):
            each.zero_grad()
            each(indices)[step % 2].sum().backward()
        for ours, plain in zip(wrapped.parameters(), module.parameters(), strict=True):
            if ours.grad is None or plain.grad is None:
                assert ours.grad is plain.grad
            else:
                assert torch.equal(ours.grad.to_dense(), plain.grad.to_dense())


def test_what_depends_on_several_results() -> None:
    """Tangents 0 and 1 make buffers 2 and 3; buffer 4 is made of both, buffer 5 of neither."""
    made = {2: (0,), 3: (1,), 4: (2, 3), 5: ()}
    buffers = tuple(
        Buffer(i, 4, Role.INPUT if i < 2 else Role.ACTIVATION, borrowed=i < 2) for i in range(6)
    )
    values = tuple(Value(i, i, "float32", (1,), (1,)) for i in range(6))
    ops = tuple(
        Op(i, "op", tuple(map(Ref, args)), (out,), Phase.BACKWARD)
        for i, (out, args) in enumerate(made.items())
    )
    gradients = (*(Ref(i) for i in range(6)), None, (Ref(2), Ref(4)))
    trace = Trace(buffers, values, ops, 0, (), (), tangents=(0, 1), gradients=gradients)
    assert unreached(trace, ()) == (False,) * 8
    assert unreached(trace, {0}) == (True, False, True, False, False, False, False, False)
    assert unreached(trace, {0, 1}) == (True, True, True, True, True, False, False, True)
