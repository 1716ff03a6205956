"""Embeddings with sparse gradients: these are made of what a planned graph returns."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend, Report
from outcore.aten import FUSED
from outcore.ir.trace import Ref, Role, Trace, refs
from outcore.measure import resident_bytes
from tests.cpu.training import PROFILED_STEPS, mean_square, tight_budget

CPU = torch.device("cpu")
ROWS, WIDTH = 512, 32

STATE_BYTES = 64 << 10
"""At least what the optimizers keep, and a step's gradients."""


class Recommender(nn.Module):
    """Two tables, whose rows are added to a map."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, WIDTH, sparse=True)
        self.items = nn.Embedding(20, WIDTH, sparse=True)
        self.bias = nn.Parameter(torch.zeros(ROWS, WIDTH))
        layers = (layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.hidden = nn.Sequential(*layers)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found = self.users(users) + self.items(items)
        if len(found) == ROWS:
            found = found + self.bias
        result: Tensor = self.hidden(torch.tanh(found) * torch.sigmoid(found))
        return result


class Shared(nn.Module):
    """One table read twice: its gradient is the sum of two sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        result: Tensor = self.hidden(self.table(users) - self.table(items))
        return result


def batch(rows: int = ROWS) -> list[Tensor]:
    return [torch.randint(20, (rows,), generator=torch.Generator().manual_seed(0))] * 2


def trained(
    kind: type[nn.Module], backend: Any, batches: Sequence[Sequence[Tensor]]
) -> list[list[Any]]:
    """The gradients of each step, as lists of numbers; two optimizers use them."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    module = kind()
    call: Any = torch.compile(module, backend=backend) if backend else module
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    others = [p for p in module.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables), torch.optim.SGD(others, lr=0.1)]
    seen = []
    for args in batches:
        loss = mean_square(call(*args))
        loss.backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        assert [g.is_sparse for g in gradients].count(True) == len(tables)
        seen.append([g.to_dense().tolist() for g in gradients])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def trace_of(kind: type[nn.Module], args: Sequence[Tensor], **options: Any) -> Trace:
    torch._dynamo.reset()
    backend = Backend(budget="1GiB", strict=True, **options)
    call = torch.compile(kind(), backend=backend)
    mean_square(call(*args)).backward()
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    return graph.captured.trace


def inside(report: Report) -> bool:
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    return report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("policy", ["recompute-all", "swap-all"])
def test_the_graph_is_planned(policy: str) -> None:
    steps = [batch()] * (PROFILED_STEPS + 3)
    expected = trained(Recommender, None, steps)
    budget = tight_budget(Recommender(), batch(), mean_square, 0.5) + STATE_BYTES
    backend = Backend(budget=budget, policy=policy, strict=True)
    assert trained(Recommender, backend, steps) == expected
    assert inside(backend.report())
    assert backend.report().counts.offload + backend.report().counts.recompute


def test_sizes_that_vary() -> None:
    sizes = (ROWS, ROWS // 2, ROWS // 4)
    steps = [batch(rows) for rows in sizes] * (PROFILED_STEPS + 2)
    expected = trained(Recommender, None, steps)
    assert trained(Recommender, Backend(budget="1GiB", strict=True), steps) == expected


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_fused_ops() -> None:
    rows = 64 * ROWS  # a kernel is worth it
    backend = Backend(budget="1GiB", fuse=True, strict=True)
    (found,) = trained(Recommender, backend, [batch(rows)])
    (expected,) = trained(Recommender, None, [batch(rows)])
    for some, other in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(some), torch.tensor(other), rtol=1e-3, atol=1e-6)
    assert any(FUSED in op.target for op in trace_of(Recommender, batch(rows), fuse=True).ops)


def test_gradients_that_stay_and_are_added_to() -> None:
    def summed(backend: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Recommender()
        call: Any = torch.compile(module, backend=backend) if backend else module
        for _ in range(PROFILED_STEPS + 2):
            result = mean_square(call(*batch()))
            result.backward(retain_graph=True)
            result.backward()
        return [p.grad.to_dense().tolist() for p in module.parameters() if p.grad is not None]

    assert summed(Backend(budget="1GiB", strict=True)) == summed(None)


def test_tables_are_parameters_and_their_gradients_are_in_their_places() -> None:
    trace = trace_of(Recommender, batch())
    values = [trace.values[v] for v in trace.inputs]
    names = [trace.buffers[value.buffer].role for value in values]
    sizes = {Role.PARAM: 15, Role.INPUT: 1}  # one tensor of indices for both tables
    assert Counter(names) == sizes
    for value, role, gradient in zip(values, names, trace.gradients, strict=False):
        assert (gradient is not None) == (role is Role.PARAM)
        if value.shape == (50, WIDTH):
            assert isinstance(gradient, Ref)
            assert trace.values[gradient.value].shape == (ROWS, WIDTH)
    assert len(trace.gradients) == len(trace.inputs) + 2


class Strided(nn.Module):
    """Indices that do not fill their memory, and values that are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, WIDTH, sparse=True)
        self.items = nn.Embedding(20, WIDTH, sparse=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, columns: Tensor) -> Tensor:
        found = self.users(columns[:, 0]).square() * self.scale
        result: Tensor = found + self.items(columns[:, 1]).sum()
        return result


def test_autograd_takes_gradients_without_a_copy() -> None:
    columns = torch.stack(batch(), 1)
    expected = trained(Strided, None, [[columns]] * 2)
    backend = Backend(budget="1GiB", strict=True)
    assert trained(Strided, backend, [[columns]] * 2) == expected
    trace = trace_of(Strided, [columns])
    for value in (trace.values[ref.value] for ref in refs(trace.gradients)):
        assert value.stride == torch.empty(value.shape).stride()


def test_sparse_gradients_are_held_memory() -> None:
    table = nn.Embedding(50, WIDTH, sparse=True)
    before = resident_bytes(CPU)
    table(torch.arange(40)).square().sum().backward()
    gc.collect()
    assert resident_bytes(CPU) - before == 40 * (WIDTH * 4 + 8)


def test_a_dense_gradient_has_memory_of_its_own() -> None:
    """Those of the tables are made of rows that are also the gradient of the bias."""
    torch.manual_seed(0)
    module = Recommender()
    call = torch.compile(module, backend=Backend(budget="1GiB", strict=True))
    for _ in range(PROFILED_STEPS + 2):
        module.zero_grad()
        mean_square(call(*batch())).backward()
        assert module.users.weight.grad is not None
        assert module.bias.grad is not None
        expected = module.users.weight.grad.to_dense().tolist()
        module.bias.grad.zero_()
        assert module.users.weight.grad.to_dense().tolist() == expected


def test_the_sum_of_two_is_computed_in_core() -> None:
    with pytest.warns(UserWarning, match="is not a plain strided tensor"):
        seen = trained(Shared, Backend(budget="1GiB"), [batch()] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seen == trained(Shared, None, [batch()] * 2)
