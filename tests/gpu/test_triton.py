"""The user's Triton kernels on a GPU: they are planned like any other op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from benchmarks.kit.modes import same_graph
from outcore import Backend
from outcore.ir.trace import Effect
from tests.cpu.training import mean_square, same, tight_budget, train
from tests.gpu.training import PROFILED_STEPS, needs_compiler

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

BLOCK = 1024
STEPS = PROFILED_STEPS + 2
pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@triton.jit
def scaled_sine(x, out, n, scale: tl.constexpr, block: tl.constexpr):  # type: ignore[name-defined]  # Triton's types are its own
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.sin(tl.load(x + at, mask=at < n)) * scale, mask=at < n)


@triton.jit
def add_into(x, out, n, block: tl.constexpr):  # type: ignore[name-defined]  # as above
    at = tl.program_id(0) * block + tl.arange(0, block)
    both = tl.load(x + at, mask=at < n) + tl.load(out + at, mask=at < n)
    tl.store(out + at, both, mask=at < n)


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by torch's ops on a simulated GPU, for which nothing compiles them."""
    if torch.cuda.get_device_name() != "simulated GPU":
        return

    def play(kernel: Any, work: Callable[..., None]) -> None:
        def run(*args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | named
            work(*(given[name] for name in kernel.arg_names))

        monkeypatch.setattr(kernel, "run", run)

    play(scaled_sine, lambda x, out, _, scale, __: out.copy_(x.sin() * scale))
    play(add_into, lambda x, out, _, __: out.add_(x))


def sine(x: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(x)
    scaled_sine[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), scale=scale, block=BLOCK)
    return out


class Sine(torch.autograd.Function):
    """A sine with Triton kernels for forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return sine(x, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        slope = sine(x + torch.pi / 2, ctx.scale)
        product = gradient * slope
        add_into[(triton.cdiv(x.numel(), BLOCK),)](slope, product, x.numel(), block=BLOCK)
        add_into[(triton.cdiv(x.numel(), BLOCK),)](-slope, product, x.numel(), block=BLOCK)
        return product, None


class Layers(nn.Module):
    """Layers with two scales: one kernel with two different constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = Sine.apply(layer(x), 2.0 + number % 2)
        return x


def test_kernels_are_found_after_torch_forgot_their_places() -> None:
    def gradients(backend: Any, *, twice: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Layers().cuda()
        call = torch.compile(module, backend=backend)
        for _ in range(1 + twice):
            module.zero_grad()
            mean_square(call(images())).backward()
            kernel_side_table.reset_table()
            kernel_side_table.add_kernel(add_into)
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    expected = gradients(same_graph, twice=False)
    assert same([gradients(Backend(budget="1GiB"), twice=True)], [expected])


def trained(backend: Any) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Layers().cuda()
    call = torch.compile(module, backend=backend)
    return train(module, call, [images()], mean_square, STEPS)


def images() -> Tensor:
    return torch.randn(4096, 256, generator=torch.Generator().manual_seed(1)).cuda()


def test_a_step_with_kernels_of_its_own_is_planned() -> None:
    expected = trained(same_graph)
    torch.manual_seed(0)
    module = Layers().cuda()
    budget = tight_budget(module, [images()], mean_square, 0.9, PROFILED_STEPS)
    del module
    backend = Backend(budget=budget, policy="pooch", strict=True)
    assert same(trained(backend), expected)
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes
    assert report.predicted_peak_bytes
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    assert backend.engine is not None
    ops = backend.engine.graphs[0].captured.trace.ops
    ours = {op.target: op for op in ops if op.target.startswith("outcore.")}
    assert sorted(name.split(".")[1].rsplit("_", 1)[0] for name in ours) == [
        "add_into",
        "scaled_sine",
        "scaled_sine",
    ]
    assert all(Effect.UNREPEATABLE in op.effects for op in ours.values())
    assert not any("empty" in op.target for op in ops), "made where it is written into"
