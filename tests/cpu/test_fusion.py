"""Fused ops: groups of ops that run as one kernel of PyTorch's own compiler."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from outcore import Backend, aten
from outcore.capture import aot_autograd, as_kernels, boxed, capture, default_partition
from outcore.capture.fusion import fuse as fusion_module
from outcore.capture.fusion.absorb import absorb
from outcore.capture.fusion.fuse import fused
from outcore.capture.fusion.groups import groups
from outcore.capture.fusion.order import reorder
from outcore.capture.nodes.registered_ops import NamedOps
from outcore.ir.trace import Effect, refs
from outcore.runtime import graph_compiler
from tests.cpu.training import PROFILED_STEPS, Normed, mean_square, snapshot, tight_budget

compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

Change = Callable[[GraphModule, int], GraphModule | None]


def run(model: nn.Module, inputs: Sequence[Tensor], change: Change | None) -> list[Tensor]:
    """Loss, gradients and buffers of a step whose joint graph was changed, run op by op."""
    torch._dynamo.reset()

    def partition(joint: GraphModule, *args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
        changed = None if change is None else change(joint, num_fwd_outputs)
        joint = joint if changed is None else changed
        return default_partition(joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs)

    def backend(module: GraphModule, examples: Sequence[Any]) -> Any:
        plain = lambda graph, _: boxed(graph)  # noqa: E731 - both compilers
        compiler = aot_autograd(fw_compiler=plain, bw_compiler=plain, partition_fn=partition)
        with as_kernels():
            return compiler(module, examples)

    torch.manual_seed(1)
    model.zero_grad()
    loss = torch.compile(model, backend=backend)(*inputs).square().sum()
    loss.backward()
    return snapshot(model, loss)


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def near(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all((a - b).norm() <= 1e-4 * b.norm() + 1e-6 for a, b in zip(some, others, strict=True))


KERNELS: dict[str, Any] = {}
OPS_OF_TESTS = NamedOps("outcore_tests")


def fuse_plainly(joint: GraphModule, outputs: int) -> GraphModule:
    """Fuse all that can be fused, into kernels that run op by op: results are bitwise equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion_module, "by_inductor", lambda module, _: module)
        patch.setattr(fusion_module, "_kernels", KERNELS)
        patch.setattr(fusion_module, "_ops", OPS_OF_TESTS)
        made, reasons = fused(joint, outputs, least_bytes=0)
    assert reasons == []
    assert made is not joint
    return made


# ---- what is a group ----------------------------------------------------------------------------


class Rms(nn.Module):
    """RMSNorm and a gated unit, as in language models."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * y
        made: Tensor = self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return made + x


def names(model: nn.Module, inputs: Sequence[Tensor], least_bytes: int = 0) -> list[list[str]]:
    """The groups of a model's step, as the names of their ops."""
    found: list[list[str]] = []

    def look(joint: GraphModule, outputs: int) -> None:
        absorb(joint, outputs, least_bytes)
        reorder(joint, outputs)
        found.extend(
            [str(op.target).split(".")[1] for op in g.ops]
            for g in groups(joint, outputs, least_bytes)
        )

    run(model, inputs, look)
    return found


def test_normalization_and_what_follows_is_one_group() -> None:
    found = names(Normed(), [torch.randn(2, 3, 8, 8)])
    forward = ["_native_batch_norm_legit_functional", "add", "relu"]
    assert found[:4] == [forward] * 4
    assert ["threshold_backward", "native_batch_norm_backward"] in [g[-2:] for g in found[4:]]


def test_a_gate_is_fused_past_the_product_in_between() -> None:
    assert ["silu", "mul"] in names(Rms(), [torch.randn(4, 8, 64, requires_grad=True)])


def test_little_is_not_worth_a_kernel() -> None:
    assert names(Normed(), [torch.randn(2, 3, 8, 8)], 1 << 20) == []


def test_backward_makes_again_what_its_kernels_can() -> None:
    saved: list[set[str]] = []

    def look(joint: GraphModule, outputs: int) -> None:
        for _ in range(2):
            trace = capture(joint, outputs).trace
            late = {
                r.value for op in trace.ops[trace.boundary :] for arg in op.args for r in refs(arg)
            }
            made = {
                trace.values[v].buffer: op.target
                for op in trace.ops[: trace.boundary]
                for v in op.outputs
                if v is not None
            }
            saved.append({made[b] for b in {trace.values[v].buffer for v in late} if b in made})
            absorb(joint, outputs, 0)

    run(Rms(), [torch.randn(4, 8, 64, requires_grad=True)], look)
    before, after = saved
    assert "aten.silu.default" in before
    assert "aten.silu.default" not in after
    assert "aten.rsqrt.default" in after, "a number per row is saved"


# ---- fused graphs give the same numbers ---------------------------------------------------------


OPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, _: torch.sigmoid(a),
    lambda a, _: torch.nn.functional.gelu(a),
    lambda a, _: torch.relu(a).t(),
    lambda a, b: a @ b,
    lambda a, _: torch.softmax(a, -1),
    lambda a, b: torch.nn.functional.layer_norm(a, (8,)) + b,
    lambda a, b: a - b.sum(0, keepdim=True),
    lambda a, _: torch.cat([a[:, 4:], a[:, :4]], 1),
    lambda a, b: torch.where(a > 0, a, b.t()),
    lambda a, _: a.reshape(4, 16).sigmoid().view(8, 8) / (1 + a.abs().max()),
    lambda a, _: nn.functional.dropout(a, 0.5),
    lambda a, b: torch.chunk(a, 2)[0].tanh().repeat(2, 1) * b,
)


class Drawn(nn.Module):
    """Ops on matrices; each op reads one or two earlier results."""

    def __init__(self, calls: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.calls = calls
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = [x, self.weight]
        for op, a, b in self.calls:
            made.append(OPS[op](made[a % len(made)], made[b % len(made)]))
        return torch.stack(made[-3:])


CALLS = st.lists(
    st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 40), st.integers(0, 40)),
    min_size=2,
    max_size=14,
)


CHUNKS = [
    (8, 13, 19),
    (2, 37, 39),
    (13, 23, 29),
    (5, 36, 29),
    (6, 22, 20),
    (7, 21, 14),
    (0, 15, 29),
]
CHUNKS += [(9, 2, 9), (11, 9, 17), (6, 17, 4), (8, 16, 22), (8, 6, 12), (12, 27, 36), (10, 6, 23)]
CHUNKS += [(12, 18, 15), (13, 9, 4), (4, 21, 23), (8, 15, 22), (13, 35, 25)]
"""Backward recomputes a matrix that forward has split."""

SUMS = [(8, 0, 9), (0, 0, 5), (12, 34, 0), (10, 0, 4), (0, 0, 17), (0, 0, 0), (1, 0, 38)]
SUMS += [(0, 0, 0)] * 4 + [(1, 3, 8)]
"""In float32 the last bit differs: another layout of the summands changes the order of sums."""


def to_the_last_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) or (a - b).norm() <= 1e-13 * b.norm() for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(calls=CALLS)
@example(calls=CHUNKS)
@example(calls=SUMS)
def test_the_same_numbers_in_any_graph(calls: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    model, x = Drawn(calls).double(), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    expected = run(model, [x], None)
    assert to_the_last_bits(run(model, [x], fuse_plainly), expected)


@pytest.mark.parametrize("kind", [Normed, Rms])
def test_the_same_numbers_and_statistics(kind: type[nn.Module]) -> None:
    model = kind()
    shape = (2, 3, 8, 8) if isinstance(model, Normed) else (4, 8, 64)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(shape)
    expected = run(model, [x], None)
    model.load_state_dict(state)
    assert same(run(model, [x], fuse_plainly), expected)


# ---- in training --------------------------------------------------------------------------------


STEPS = PROFILED_STEPS + 1


def digest(tensors: Sequence[Tensor]) -> bytes:
    """A digest of all bits, because kept tensors would count against the budget."""
    return b"".join(sha256(t.contiguous().numpy().tobytes()).digest() for t in tensors)


def images() -> Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def trained(backend: Backend | str, *, retain: bool = False) -> list[bytes]:
    """Digests of loss, gradients and statistics of some steps of `Normed`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Normed(), images()
    call = torch.compile(model, backend=backend)
    seen = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = mean_square(call(x))
        if retain:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        seen.append(digest(snapshot(model, loss)))
    return seen


@pytest.fixture(scope="module")
def budget() -> int:
    torch.manual_seed(0)
    return tight_budget(Normed(), [images()], mean_square, 0.4, fuse=True)


@pytest.fixture(scope="module")
def in_core() -> list[bytes]:
    backend = Backend(budget="1GiB", fuse=True)
    seen = trained(backend)
    assert backend.report().state == "in-core"
    return seen


def fused_ops(backend: Backend) -> list[str]:
    assert backend.engine is not None
    (graph,) = backend.engine.registry.statuses()
    assert graph.planned is not None
    ops = graph.planned.problem.trace.ops
    return [op.target for op in ops if op.target.startswith(aten.FUSED)]


@compiled
@pytest.mark.parametrize("policy", ["search", "swap-all", "recompute-all"])
def test_the_same_gradients_under_any_plan(policy: str, budget: int, in_core: list[bytes]) -> None:
    backend = Backend(budget=budget, policy=policy, fuse=True)
    assert trained(backend) == in_core
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute > 0
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
    assert len(fused_ops(backend)) >= 8


@compiled
def test_backward_twice(budget: int, in_core: list[bytes]) -> None:
    backend = Backend(budget=int(budget * 1.3), policy="swap-all", fuse=True)
    assert trained(backend, retain=True) == in_core


@compiled
def test_gradients_are_near_those_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Normed(), images()
    mean_square(model(x)).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    call = torch.compile(model, backend=Backend(budget="1GiB", fuse=True))
    mean_square(call(x)).backward()
    assert near([p.grad for p in model.parameters() if p.grad is not None], expected)


@compiled
def test_plans_are_found_again(budget: int, in_core: list[bytes], tmp_path: Path) -> None:
    first = Backend(budget=budget, policy="swap-all", fuse=True)
    trained(first)
    first.save_plans(tmp_path / "plans.json", most=0)
    again = Backend(budget=budget, fuse=True, plan=tmp_path / "plans.json", strict=True)
    assert trained(again) == in_core
    assert fused_ops(again) == fused_ops(first)


def test_fusing_counts_as_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(joint: Any, outputs: int) -> tuple[Any, list[str]]:
        time.sleep(1)
        return joint, []

    monkeypatch.setattr(graph_compiler, "fused", slow)
    backend = Backend(budget="1GiB", fuse=True)
    trained(backend)
    taken = backend.report().capture_seconds
    assert taken is not None
    assert taken >= 1


def test_what_cannot_be_compiled_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(fusion_module, "by_inductor", fail)
    monkeypatch.setattr(fusion_module, "_kernels", {})
    backend = Backend(budget="1GiB", fuse=True)
    assert trained(backend) == trained("aot_eager")
    assert fused_ops(backend) == []
    (note,) = backend.report().notes
    assert "no compiler here" in note


@compiled
def test_statistics_do_not_keep_a_group_from_running_again() -> None:
    backend = Backend(budget="1GiB", fuse=True)
    trained(backend)
    assert backend.engine is not None
    (graph,) = backend.engine.registry.statuses()
    assert graph.planned is not None
    ops = graph.planned.problem.trace.ops
    found = [op for op in ops if "batch_norm_add_relu" in op.target]
    assert found
    assert not any(op.effects for op in found)


# ---- what was wrong once ------------------------------------------------------------------------


class ReadsStatistics(nn.Module):
    """The new statistics of a batch norm are read as well as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            assert isinstance(norm.running_mean, Tensor)
            y = norm(x)
            x = convolution(torch.sigmoid(y + norm.running_mean.view(1, -1, 1, 1) * 100))
        return x


@compiled
def test_a_group_that_reads_new_statistics_runs_once() -> None:
    torch.manual_seed(0)
    model, x = ReadsStatistics(), images() + 1
    backend = Backend(budget="1GiB", fuse=True)
    call = torch.compile(model, backend=backend)
    for _ in range(STEPS):
        mean_square(call(x)).backward()
    assert backend.engine is not None
    (graph,) = backend.engine.registry.statuses()
    assert graph.planned is not None
    ops = graph.planned.problem.trace.ops
    norms = [op for op in ops if op.target.startswith(f"{aten.FUSED}.batch_norm")]
    assert [op.effects for op in norms] == [{Effect.UNREPEATABLE}] * 3


@compiled
@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm2d(8), lambda: nn.GroupNorm(2, 8), lambda: nn.LayerNorm(64)]
)
def test_statistics_under_autocast_are_as_precise_as_parameters(
    norm: Callable[[], nn.Module],
) -> None:
    """torch's compiler rounds those of batch norm, whose kernel in backward refuses them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU(), nn.GELU())
    x = torch.randn(16, 3, 64, 64)

    def gradients(call: Any) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_square(call(x).float())
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(model)
    call = torch.compile(model, backend=Backend(budget="1GiB", fuse=True, strict=True))
    for _ in range(3):
        for found, other in zip(gradients(call), expected, strict=True):
            assert (found - other).norm() <= 1e-2 * other.norm()


class OverItsMaximum(nn.Module):
    """The derivative of a maximum compares elements with it for equality."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(1023)), nn.Parameter(torch.randn(1023))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(torch.tanh(x * self.weight + self.bias) * self.weight)
        return y / y.max()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compared_for_being_equal_is_what_was_saved(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = OverItsMaximum().to(dtype), torch.randn(1023, 1023, dtype=dtype)
    model(x).float().square().mean().backward()
    expected = [p.grad.float() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    backend = Backend(budget="1GiB", fuse=True)
    torch.compile(model, backend=backend)(x).float().square().mean().backward()
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        off = (parameter.grad.float() - other).norm() / other.norm()
        assert off < {torch.float32: 1e-4}.get(dtype, 0.1)


class AddsNothing(nn.Module):
    """Inductor knows that the sum equals its argument, and would return the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        made: Tensor = self.second((y + torch.full_like(y, 0.0)) @ self.second.weight) + y
        return made


@compiled
def test_a_kernel_never_returns_what_it_was_given() -> None:
    model, x = AddsNothing(), torch.randn(1024, 512)
    backend = Backend(budget="1GiB", fuse=True, strict=True)
    call = torch.compile(model, backend=backend)
    for _ in range(STEPS):
        mean_square(call(x)).backward()
    report = backend.report()
    assert report.predicted_peak_bytes is not None
    assert not report.notes
    names = [k.name for k in fusion_module._kernels.values() if not isinstance(k, str)]
    assert any("add" in name and "full" in name for name in names), names


STEP_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chosen": lambda y, k: y * (y >= k),
    "derivative": lambda y, k: torch.relu(y - k),
    "floor": lambda y, k: torch.div(y, k.abs(), rounding_mode="floor") * y,
    "integers": lambda y, k: (y / k).int() * y,
    "magnitude": lambda y, k: (y - k).abs(),
    "power": lambda y, k: (y.detach().amax(-1, keepdim=True) - y) ** 2.5,
    "softplus": lambda y, k: torch.nn.functional.softplus(y.detach() - k + 1, 1, 1) * y,
}
"""Functions with a step at y = k, or whose derivative has one, or that are NaN beyond it."""


@compiled
@pytest.mark.parametrize("name", STEP_FUNCTIONS)
def test_backward_is_on_the_side_of_a_step_that_forward_was_on(name: str) -> None:
    """Also for the k-th largest element itself, as in a mixture of experts."""

    def chosen(x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(x)
        return STEP_FUNCTIONS[name](y, y.detach().topk(4)[0][..., -1:])

    torch.manual_seed(0)
    x = torch.randn(2053, 515, requires_grad=True)
    chosen(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(chosen, backend=Backend(budget="1GiB", fuse=True))(x).sum().backward()
    assert x.grad is not None
    assert expected is not None
    assert (x.grad - expected).norm() < 1e-5 * expected.norm()


@compiled
def test_what_rounding_leaves_is_told_from_what_was_rounded() -> None:
    """Inductor treats a number that was cast down and up again as the original number."""
    torch.manual_seed(0)
    x, weight = torch.randn(2053, 515, requires_grad=True), torch.randn(515, 515).bfloat16()
    scale = torch.randn(515, requires_grad=True)

    def scaled(x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(x)
        rounded = y.bfloat16()
        return (rounded @ weight).float() * 0 + (y - rounded.float()) * scale

    found: list[Tensor] = []
    for call in (scaled, torch.compile(scaled, backend=Backend(budget="1GiB", fuse=True))):
        scale.grad = None
        call(x).square().sum().backward()
        assert scale.grad is not None
        found.append(scale.grad)
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


class GivesItsMean(nn.Module):
    """Autograd saves nothing that it returns, so a caller may change the results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * self.weight
        mean = h.mean(-1, keepdim=True)
        y = h - mean
        return y * y.sigmoid() * h, mean


@compiled
def test_a_result_that_nobody_saves_may_be_changed() -> None:
    torch.manual_seed(0)
    model, x = GivesItsMean(), torch.randn(1024, 512 * 2)
    call = torch.compile(model, backend=Backend(budget="1GiB", fuse=True))
    made, mean = call(x)
    with torch.no_grad():
        mean.zero_()
    made.square().mean().backward()
    found = model.weight.grad
    model.weight.grad = None
    model(x)[0].square().mean().backward()
    assert found is not None
    assert model.weight.grad is not None
    assert near([found], [model.weight.grad])


class Writes(torch.autograd.Function):
    """Its backward overwrites a buffer that it has read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        read = gradient * ctx.scale
        product = read @ torch.ones(512, 512)
        ctx.scale.mul_(0.5)
        ctx.scale.add_(1.0)
        return read.sigmoid() + product, None


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))
        self.register_buffer("scale", torch.full((512, 512), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return Writes.apply(x @ self.weight, self.scale)  # type: ignore[no-any-return]  # torch's


@compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:outcore runs a graph in-core")
def test_a_graph_that_writes_is_left_alone() -> None:
    seen = []
    for backend in (None, Backend(budget="1GiB", fuse=True)):
        torch.manual_seed(0)
        model = Writing()
        call = model if backend is None else torch.compile(model, backend=backend)
        x = torch.randn(512, 512)
        for _ in range(3):
            model.zero_grad()
            mean_square(call(x)).backward()
        seen.append(snapshot(model, torch.zeros(())))
    assert same(*seen)


class Gated(nn.Module):
    """Its forward writes results over arguments, even in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.first(x))
        made: Tensor = self.second(y * y.sigmoid()) * y
        return made


@compiled
def test_no_op_returns_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._functorch.config, "error_on_custom_op_aliasing", True)
    model, x = Gated(), torch.randn(1024, 512)
    call = torch.compile(model, backend=Backend(budget="1GiB", fuse=True))
    for _ in range(STEPS):
        mean_square(call(x)).backward()


@compiled
def test_another_default_dtype_is_another_kernel() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(768, 768))

        def forward(self, i: Tensor) -> Tensor:
            return self.weight @ ((i * 0.3).sin() * (i * 0.7).cos())

    i = torch.randint(0, 100, (768, 768))
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            torch._dynamo.reset()
            model = Waves()
            made = torch.compile(model, backend=Backend(budget="1GiB", fuse=True))(i)
            assert made.dtype == dtype
            assert near([made.detach()], [model(i).detach()])
        finally:
            torch.set_default_dtype(torch.float32)


def test_groups_that_fail_only_where_they_write_over_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(module: GraphModule, _: Any) -> Any:
        if module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            raise KeyError("buf2")
        return module

    monkeypatch.setattr(fusion_module, "by_inductor", fail)
    monkeypatch.setattr(fusion_module, "_kernels", {})
    monkeypatch.setattr(fusion_module, "_ops", NamedOps("outcore_tests_over"))
    found: list[list[str]] = []

    def look(joint: GraphModule, outputs: int) -> GraphModule:
        made, reasons = fused(joint, outputs, least_bytes=0)
        found.append(reasons)
        return made

    run(Normed(), [torch.randn(2, 3, 8, 8)], look)
    assert found == [[]]
    assert any(kernel.into == () for kernel in fusion_module._kernels.values())


def test_a_result_that_is_an_argument_gets_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(Normed(), [torch.randn(2, 3, 8, 8)], fuse_plainly)
    kernel = next(k for k in KERNELS.values() if not (isinstance(k, str) or k.into))
    key = next(iter(kernel.compiled))  # KERNELS holds those of all earlier tests, for any inputs
    given = [
        torch.empty_strided(shape, stride, dtype=dtype).zero_() for dtype, shape, stride, _ in key
    ]
    monkeypatch.setitem(kernel.compiled, key, lambda *given: [given[0]] * kernel.results)
    made = kernel.run(given)
    assert same(made, [given[0]] * kernel.results)
    places = [t.untyped_storage().data_ptr() for t in (given[0], *made)]
    assert len(set(places)) == len(places)


def test_what_lies_otherwise_than_expected_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    run(Normed(), [torch.randn(2, 3, 8, 8)], fuse_plainly)
    kernel = next(k for k in KERNELS.values() if k.name.endswith("batch_norm_backward"))

    def fail(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(fusion_module, "by_inductor", fail)
    (key,) = kernel.compiled
    given = [torch.randn(shape) for _, shape, _, _ in key]
    expected = kernel.module(*given)
    given = [
        t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t for t in given
    ]
    assert near(kernel.run(given), expected)
