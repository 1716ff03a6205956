"""Results written over arguments that die there: bitwise equal, and without extra memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from outcore import Backend, aten
from outcore.capture import capture
from outcore.ir.program import Run
from outcore.ir.trace import Trace
from outcore.measure import metered
from tests.cpu.donating import DTYPES, ELEMENTWISE, ROWS, bits, elementwise, rows, rows_given
from tests.cpu.donating import random as drawn
from tests.cpu.models import gpt2
from tests.cpu.training import PROFILED_STEPS, same, tight_budget, train

ATEN = torch.ops.aten


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "given"), ELEMENTWISE)
def test_elementwise(target: str, given: int, dtype: torch.dtype) -> None:
    for expected, found, of in elementwise(target, given, dtype, "cpu"):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "given"), ROWS)
def test_rows(target: str, given: int, dtype: torch.dtype) -> None:
    for expected, found, of in rows(target, given, dtype, "cpu"):
        assert torch.equal(bits(found), bits(expected)), of


@pytest.mark.parametrize(("target", "given"), ELEMENTWISE)
def test_what_is_elementwise_takes_no_memory(target: str, given: int) -> None:
    op = aten.resolve(target)
    kinds = [str(a.type) for a in op._schema.arguments if a.default_value is None]
    x = torch.randn(1 << 16)
    args = [x.clone() if k == "Tensor" else {"bool": False}.get(k, 0.25) for k in kinds]
    takes_no_memory(target, given, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("target", "given"), ROWS)
def test_what_goes_by_rows_takes_no_memory(
    target: str, given: int, dim: int, dtype: torch.dtype
) -> None:
    takes_no_memory(target, given, rows_given(target, drawn((32, 64, 65), dtype, "cpu", 0), dim))


def takes_no_memory(target: str, given: int, args: list[Any]) -> None:
    """Check that a result written over an argument needs less than half of that argument's size."""
    _, out = aten.DONATIONS[target]
    over, expected = args[given], aten.resolve(target)(*args)
    kwargs = {out: over} if out else {}
    found, reading = metered(lambda: aten.in_place(target)(*args, **kwargs))
    assert found is over
    assert torch.equal(found, expected)
    assert reading.peak_bytes() < over.nbytes // 2


def donated(trace: Trace, target: str) -> list[int]:
    """For each op `target` in turn: positions of the arguments that its result may overwrite."""
    of = [op for op in trace.ops if op.target == target]
    given = [(d, trace.ops[d.op]) for d in trace.donations]
    return [
        [getattr(a, "value", None) for a in op.args].index(d.source) for d, op in given if op in of
    ]


def captured(
    target: str, *, turned: tuple[bool, bool] = (False, False), half: bool = False
) -> list[int]:
    """Positions it may overwrite. `turned`: transposed arguments; `half`: between precisions."""

    def step(x: Tensor, y: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        negative = zip((x.neg(), y.neg()), turned, strict=True)
        first, second = (t.transpose(0, 1) if away else t for t, away in negative)
        if "backward" in target:
            made = aten.resolve(target)(first, second, 1, torch.half if half else torch.float)
        else:
            made = aten.resolve(target)(first, 1, half)
        return made, tangents * 2

    dtype = torch.half if half and "backward" not in target else torch.float
    with FakeTensorMode():
        joint = make_fx(step)(*(torch.empty(8, 8, dtype=dtype) for _ in range(3)))
    return donated(capture(joint, 1).trace, target)


@pytest.mark.parametrize("target", sorted({target for target, _ in ROWS}))
def test_rows_are_written_over_what_lies_in_order(target: str) -> None:
    positions, _ = aten.DONATIONS[target]
    assert captured(target) == [*positions]
    assert captured(target, half=True) == []
    assert captured(target, turned=(True, True)) == []


@pytest.mark.parametrize("target", sorted({t for t, _ in ROWS if "backward" in t}))
@pytest.mark.parametrize("given", [0, 1])
def test_one_of_two_lies_in_order(target: str, given: int) -> None:
    found = captured(target, turned=(given == 1, given == 0))
    misses = target == "aten._log_softmax_backward_data.default" and given == 1
    assert found == ([] if misses else [given])


@pytest.mark.parametrize(("target", "given"), ROWS)
def test_kernels_write_in_order(target: str, given: int) -> None:
    """Why only arguments in order are overwritten: otherwise the values are misplaced."""
    x = drawn((5, 7), torch.float32, "cpu", 0).t()
    args = rows_given(target, x, 1)
    args[given] = args[given].t().contiguous().t()
    expected = aten.resolve(target)(*args)
    assert expected.is_contiguous()
    aten.in_place(target)(*args, **{aten.DONATIONS[target][1]: args[given]})
    assert not torch.equal(args[given], expected)


class Heads(nn.Module):
    """Attention by matrix products and softmax. `turned`: the final log-softmax is transposed."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(4))
        self.last = nn.Linear(32, 500)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            weights = torch.dropout(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1), 0.1, True)
            x = x + (weights @ v).transpose(1, 2).flatten(2)
        scores = self.last(x)
        if self.turned:
            return torch.sin(torch.log_softmax(scores, -1).transpose(1, 2)).square().mean()
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Read(nn.Module):
    """GPT-2 from transformers with attention in plain PyTorch, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(500, width=32, layers=2, attn_implementation="eager")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.model(tokens).logits
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def tokens() -> Tensor:
    return torch.arange(8 * 64).view(8, 64) * 7 % 500


def hidden() -> Tensor:
    return torch.linspace(-1, 1, 8 * 64 * 32).view(8, 64, 32)


def trained(module: nn.Module, args: Sequence[Tensor], backend: Any) -> list[list[Tensor]]:
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend)
    return train(module, call, args, lambda loss: loss, PROFILED_STEPS + 3)


@pytest.mark.parametrize(
    ("make", "made_of", "layers", "over_gradients", "policy"),
    [
        (Heads, hidden, 4, [0, 1], "swap-all"),
        (partial(Heads, turned=True), hidden, 4, [1], "recompute-all"),
        (Read, tokens, 2, [0, 1], "recompute-all"),
    ],
    ids=["attention", "turned", "gpt2"],
)
def test_gradients_inside_a_budget(
    make: Callable[[], nn.Module],
    made_of: Callable[[], Tensor],
    layers: int,
    over_gradients: list[int],
    policy: str,
) -> None:
    """Softmax overwrites the scores with weights; its gradient is computed in place too."""
    torch.manual_seed(0)
    args, module = (made_of(), tokens()), make()
    expected = trained(copy.deepcopy(module), args, "aot_eager")
    budget = tight_budget(copy.deepcopy(module), args, lambda loss: loss)
    backend = Backend(budget=budget, policy=policy)
    assert same(trained(module, args, backend), expected)
    assert backend.report().state == "planned"
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    trace = graph.captured.trace
    runs = [i.action for i in graph.planned.program.body if isinstance(i.action, Run)]
    over = Counter(trace.ops[run.op].target for run in runs if run.donate)
    assert over["aten._softmax.default"] >= layers
    assert over["aten._softmax_backward_data.default"] == layers
    assert over["aten._log_softmax.default"] >= 1
    assert donated(trace, "aten._log_softmax_backward_data.default") == over_gradients
