"""Replacing batch normalization by cuDNN's op where plain PyTorch uses it; no GPU is needed.

On a CPU, the op with statistics is bitwise equal to PyTorch's own, so steps can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from outcore import Backend
from outcore.capture import by_cudnn, capture
from outcore.ir.verify import verify_trace
from tests.cpu.training import batch, mean_square, same, tight_budget, train

ATEN = torch.ops.aten
RESERVE_BYTES = 48
MOMENTUM, EPS = 0.1, 1e-5
STEPS = 7


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Pretend that torch has cuDNN and always selects it; returns the arguments of each query."""
    calls: list[tuple[Any, ...]] = []

    def select(*args: Any) -> Any:
        calls.append(args)
        return torch._C._BatchNormBackend.Cudnn  # type: ignore[attr-defined]  # the stubs lack it

    monkeypatch.setattr(torch._C, "_select_batch_norm_backend", select)
    return calls


def reserve(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    name = "_get_cudnn_batch_norm_reserve_space_size"
    monkeypatch.setattr(torch._C, name, lambda *_: nbytes)
    if nbytes:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # Otherwise a CUDA build would initialize the device.
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda _: None)


def with_statistics(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, t: Tensor) -> Any:
    made = ATEN._native_batch_norm_legit_functional(x, w, b, m, v, True, MOMENTUM, EPS)
    y, mean, rstd, new_mean, new_variance = made
    wanted = [True, True, True]
    back = ATEN.native_batch_norm_backward(t, x, w, m, v, mean, rstd, True, EPS, wanted)
    return y, new_mean, new_variance, *back


def of_instances(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, t: Tensor) -> Any:
    y, mean, rstd = ATEN._native_batch_norm_legit.no_stats(x, w, b, True, MOMENTUM, EPS)
    wanted = [True, True, True]
    back = ATEN.native_batch_norm_backward(t, x, w, None, None, mean, rstd, True, EPS, wanted)
    return y, m * 1, v * 1, *back


def frozen(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, t: Tensor) -> Any:
    made = ATEN._native_batch_norm_legit_functional(x, w, b, m, v, True, MOMENTUM, EPS)
    y, mean, rstd, new_mean, new_variance = made
    wanted = [True, False, False]
    back = ATEN.native_batch_norm_backward(t, x, w, m, v, mean, rstd, True, EPS, wanted)
    return y, new_mean, new_variance, *back


def joint_of(step: Callable[..., Any], layout: torch.memory_format) -> GraphModule:
    with FakeTensorMode():
        of = torch.empty(2, 4, 8, 8, device="cuda").to(memory_format=layout)
        given = [torch.empty(4, device="cuda") for _ in range(4)]
        return make_fx(step)(of, *given, torch.empty_like(of))


def ops(joint: GraphModule) -> list[str]:
    return [str(n.target) for n in joint.graph.nodes if "norm" in str(n.target)]


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            with_statistics,
            ["aten._batch_norm_with_update_functional.default", "aten.batch_norm_backward.default"],
        ),
        (of_instances, ["aten.cudnn_batch_norm.default", "aten.cudnn_batch_norm_backward.default"]),
    ],
)
def test_a_pair_is_replaced(
    step: Callable[..., Any],
    expected: list[str],
    layout: torch.memory_format,
    asked: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve(monkeypatch, RESERVE_BYTES)
    joint = joint_of(step, layout)
    by_cudnn(joint)
    assert ops(joint) == expected
    assert len(asked) == 1
    captured = capture(joint, 3)
    verify_trace(captured.trace)
    forward, backward = (op for op in captured.trace.ops if "norm" in op.target)
    crossing = set(captured.trace.writes[forward.id]) & set(captured.trace.reads[backward.id])
    sizes = sorted(captured.trace.buffers[each].nbytes for each in crossing)
    assert sizes == [16, 16, RESERVE_BYTES]
    by_cudnn(joint)
    assert ops(joint) == expected, "once is enough"


def test_cudnn_makes_all_gradients_or_is_not_asked(asked: list[tuple[Any, ...]]) -> None:
    joint = joint_of(frozen, torch.contiguous_format)
    before = ops(joint)
    by_cudnn(joint)
    assert ops(joint) == before
    assert not asked


def test_what_would_be_copied_first_stays(asked: list[tuple[Any, ...]]) -> None:
    with FakeTensorMode():
        of = torch.empty(4, 2, 8, 8, device="cuda").transpose(0, 1)
        given = [torch.empty(4, device="cuda") for _ in range(4)]
        joint = make_fx(with_statistics)(of, *given, torch.empty_like(of))
    before = ops(joint)
    by_cudnn(joint)
    assert ops(joint) == before
    assert not asked


@pytest.mark.skipif(torch.backends.cudnn.is_available(), reason="this torch has cuDNN")
def test_without_cudnn_nothing_changes() -> None:
    joint = joint_of(with_statistics, torch.contiguous_format)
    before = ops(joint)
    by_cudnn(joint)
    assert ops(joint) == before


class Normalized(nn.Module):
    """Three batch normalizations, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        for parameter in self.norms[1].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = torch.relu(norm(self.last(x)))
        return x


@pytest.mark.parametrize("policy", ["swap-all{min_bytes=1KiB}", "recompute-all", "search"])
def test_steps_are_those_of_plain_torch(
    policy: str, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed normalizations do not update their statistics twice."""
    reserve(monkeypatch, 0)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Normalized()

    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    budget = tight_budget(made(), [x], mean_square)
    module, plain = made(), made()
    backend = Backend(budget=budget, policy=policy)
    seen = train(module, torch.compile(module, backend=backend), [x], mean_square, STEPS)
    assert same(seen, train(plain, plain, [x], mean_square, STEPS))
    assert backend.engine is not None
    targets = [op.target for op in backend.engine.graphs[0].captured.trace.ops]
    assert targets.count("aten._batch_norm_with_update_functional.default") == 2
    assert targets.count("aten._native_batch_norm_legit_functional.default") == 1
    assert backend.report().state == "planned"
    assert asked


def test_under_no_grad_too(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, 0)
    torch.manual_seed(0)
    module = nn.BatchNorm2d(3)
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    x = batch(0)
    with torch.no_grad():
        found = torch.compile(module, backend=Backend(budget="1GiB"))(x)
        assert torch.equal(found, plain(x))
    assert same([list(module.buffers())], [list(plain.buffers())])
    assert asked


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_over_transposed_series_is_that_of_eager(training: bool) -> None:
    """Its result does not lie like its input, and what follows is traced by how it lies.

    `aot_eager` cannot run this: torch's description of the norm has the strides of the input.
    """

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.key = nn.BatchNorm1d(16), nn.Linear(16, 16)

        def forward(self, x: Tensor, query: Tensor) -> Tensor:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            keys = self.key(x).view(12, 8, 2, 8).transpose(1, 2)
            return torch.matmul(query, keys.transpose(2, 3)).softmax(-1)

    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Series().train(training)
        args = [torch.randn(12, 8, 16), torch.randn(12, 2, 8, 8)]
        return train(module, torch.compile(module, backend=backend), args, mean_square, STEPS)

    backend = Backend(budget="1GiB", strict=True)
    assert same(trained(backend), trained("eager"))
    assert backend.engine is not None
    assert not any(graph.corrections for graph in backend.engine.graphs)
