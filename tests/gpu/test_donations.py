"""Results that CUDA's kernels write over arguments: identical bit for bit, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kit.modes import same_graph
from outcore import Backend, aten
from tests.cpu.donating import (
    DTYPES,
    ELEMENTWISE,
    ROWS,
    bits,
    elementwise,
    random,
    rows,
    rows_given,
)
from tests.cpu.training import same, tight_budget, train
from tests.gpu.training import PROFILED_STEPS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "given"), ELEMENTWISE)
def test_elementwise(target: str, given: int, dtype: torch.dtype) -> None:
    for expected, found, of in elementwise(target, given, dtype, "cuda"):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "given"), ROWS)
def test_rows(target: str, given: int, dtype: torch.dtype) -> None:
    for expected, found, of in rows(target, given, dtype, "cuda"):
        assert torch.equal(bits(found), bits(expected)), of


def peak_bytes(call: Callable[[], Tensor]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del made
    return peak


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("target", "given"), ROWS)
def test_what_goes_by_rows_takes_a_result_less(target: str, given: int, dim: int) -> None:
    """The gradient of softmax computes a temporary product first in both cases."""
    args = rows_given(target, random((64, 128, 256), torch.float32, "cuda", 0), dim)
    over, out = args[given], aten.DONATIONS[target][1]
    apart = peak_bytes(lambda: aten.resolve(target)(*args))
    within = peak_bytes(lambda: aten.in_place(target)(*args, **{out: over}))
    assert within <= apart - over.nbytes


class Turned(nn.Module):
    """Layers in which log-softmax's backward gets a gradient that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(torch.log_softmax(layer(x), -1).transpose(1, 2)).transpose(1, 2)
        return x.square().mean()


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_gradients_that_are_not_in_order(policy: str) -> None:
    """Torch describes results as laid out like these gradients; the kernels write contiguously."""
    torch.manual_seed(0)
    given = torch.randn(64, 128, 64, device="cuda")

    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Turned().cuda()
        call = torch.compile(module, backend=backend)
        return train(module, call, [given], lambda loss: loss, PROFILED_STEPS + 3)

    budget = tight_budget(
        Turned().cuda(), [given], lambda loss: loss, profiled_steps=PROFILED_STEPS
    )
    backend = Backend(budget=budget, policy=policy)
    assert same(trained(backend), trained(same_graph))
    assert backend.report().state == "planned"
