"""Pitfalls of similar tools: silently wrong gradients, leaks, threads, and bad input."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outcore import Backend
from outcore.capture import passing
from outcore.errors import (
    BudgetError,
    CaptureError,
    InfeasibleError,
    OptionError,
    OutcoreError,
    PolicyError,
    SpillError,
    StepError,
    VerifyError,
)
from outcore.ir.program import Run
from outcore.ir.trace import Role
from outcore.measure import resident_bytes
from outcore.runtime.graphs.obstacle import Obstacle
from outcore.runtime.step.metered_step import _running
from tests.cpu.training import (
    PROFILED_STEPS,
    Away,
    Small,
    away,
    back,
    batch,
    mean_square,
    same,
    small_reference,
    snapshot,
    tight_budget,
    train,
)

STEPS = PROFILED_STEPS + 2
TIGHT = "2MiB"
CPU = torch.device("cpu")
WIDTH = 64
ROWS = 1024
LAYERS = 5
ALL = LAYERS + 1


def compiled(module: nn.Module, **options: Any) -> tuple[Any, Backend]:
    torch._dynamo.reset()
    given: dict[str, Any] = {"budget": "1GiB", "policy": "swap-all", **options}
    backend = Backend(**given)
    return torch.compile(module, backend=backend), backend


def below_in_core(module: nn.Module, args: list[Tensor]) -> int:
    """A budget slightly below what the model needs in-core."""
    gc.collect()  # leftovers of a dead module would count as resident
    return tight_budget(module, args, mean_square, 0.85)


def moved(backend: Backend) -> int:
    """How many gaps are offloaded or recomputed."""
    counts = backend.report().counts
    return counts.offload + counts.recompute


class Positions(nn.Module):
    """Linear layers without bias, and dropout at `place`, or everywhere if that is `ALL`.

    The output is homogeneous of degree one in each weight.
    """

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.place = place

    def _drop(self, x: Tensor, place: int) -> Tensor:
        return F.dropout(x, 0.4) if self.place in (place, ALL) else x

    def forward(self, x: Tensor) -> Tensor:
        x = self._drop(x, 0)
        for place, layer in enumerate(self.layers, 1):
            x = self._drop(F.relu(layer(x)), place)
        return x


class Rearranged(nn.Module):
    """Layer norms of volumes permuted to channels last, as in MONAI's Swin transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            last = layer(x).permute(0, 2, 3, 4, 1)
            x = x + F.layer_norm(last, [4]).permute(0, 4, 1, 2, 3).relu()
        return x


class _Kept(torch.autograd.Function):
    """A product whose gradient is said to be itself, or a view of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, view: bool) -> Tensor:
        y = weight * x
        ctx.save_for_backward(y)
        ctx.view = view
        return y

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return y.view(y.shape) if ctx.view else y, None, None


class TestGradients:
    @pytest.mark.parametrize("place", range(ALL + 1))
    def test_euler_identity_with_dropout_anywhere(self, place: int) -> None:
        """The loss is homogeneous of degree two in each weight, so <dL/dw, w> is twice the loss."""
        module = Positions(place)
        x = torch.rand(ROWS, WIDTH)
        budget = below_in_core(module, [x])
        call, backend = compiled(module, budget=budget, policy="recompute-all")
        for step in range(STEPS):
            torch.manual_seed(step)
            module.zero_grad()
            loss = mean_square(call(x))
            loss.backward()
            for w in module.parameters():
                assert w.grad is not None
                torch.testing.assert_close((w.grad * w).sum(), 2 * loss, rtol=1e-4, atol=0)
        assert backend.report().counts.recompute > 0

    def test_views_of_a_square_weight_are_the_weight(self) -> None:
        class Views(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(torch.tanh(x @ self.w.t()) @ self.w) @ self.w.t()

        torch.manual_seed(0)
        module = Views()
        x = torch.randn(ROWS, WIDTH)
        budget = below_in_core(module, [x])
        torch.manual_seed(0)
        module, plain = Views(), Views()
        plain.load_state_dict(module.state_dict())
        call, backend = compiled(module, budget=budget, policy="swap-all{min_bytes=1KiB}")
        seen = train(module, call, [x], mean_square, STEPS)
        assert same(seen, train(plain, plain, [x], mean_square, STEPS))
        assert moved(backend) > 0
        assert backend.engine is not None
        trace = backend.engine.graphs[0].captured.trace
        weights = [b for b in trace.buffers if b.borrowed and b.nbytes == 4 * WIDTH * WIDTH]
        assert len(weights) == 1
        assert sum(v.buffer == weights[0].id for v in trace.values) == 2
        assert weights[0].role is Role.PARAM
        assert not any("aten.t." in op.target or "permute" in op.target for op in trace.ops)

    @pytest.mark.parametrize("shape", [(WIDTH, 4), (4 * WIDTH,), (4, WIDTH)])
    def test_parameters_never_share_the_memory_of_a_gradient(self, shape: tuple[int, ...]) -> None:
        """Autograd copies the gradient of both only if it is one object, so of one shape.

        `aot_eager` lets parameters of different shapes share it, plain PyTorch does not.
        """

        class Summed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Parameter(torch.ones(WIDTH, 4))
                self.second = nn.Parameter(torch.ones(shape))

            def forward(self, x: Tensor) -> Tensor:
                return ((self.first + self.second.view(WIDTH, 4)).flatten() * x).tanh()

        def accumulated(backend: Any) -> list[list[Tensor]]:
            torch._dynamo.reset()
            module, seen = Summed(), []
            call = torch.compile(module, backend=backend)
            for step in range(STEPS):
                if step % 2 == 0:
                    module.zero_grad()
                mean_square(call(x)).backward()
                seen.append(snapshot(module, x))
            first, second = (p.grad for p in module.parameters())
            assert first is not None
            assert second is not None
            assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
            return seen

        x = torch.linspace(-1, 1, WIDTH * 4)
        assert same(accumulated(Backend(budget="1GiB", strict=True)), accumulated("eager"))

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated")
    @pytest.mark.parametrize("view", [False, True])
    def test_no_gradient_is_in_the_memory_of_a_result(self, view: bool) -> None:
        """Clipping it would change what the user was given. `aot_eager` lets them share it."""

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 1)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                made = _Kept.apply(self.scale, x, view)
                return made, self.layer(made)

        module = Scaled()
        call = torch.compile(module, backend=Backend(budget="1GiB", strict=True))
        for step in range(STEPS):
            module.zero_grad()
            x = torch.full((WIDTH,), step + 1.0)
            made, scored = call(x)
            scored.sum().backward()
            assert module.scale.grad is not None
            assert torch.equal(module.scale.grad, x)
            module.scale.grad.zero_()
            assert torch.equal(made, x)

    def test_running_statistics_are_updated_once_per_step(self) -> None:
        def make() -> nn.Module:
            torch.manual_seed(0)
            parts = [
                nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for _ in range(4)
            ]
            return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *parts)

        module, plain = make(), make()
        budget = tight_budget(make(), [batch(0)], mean_square, 0.6)
        call, backend = compiled(module, budget=budget, policy="recompute-all")
        seen = train(module, call, [batch(0)], mean_square, STEPS)
        assert same(seen, train(plain, plain, [batch(0)], mean_square, STEPS))
        assert [int(b) for n, b in module.named_buffers() if "tracked" in n] == [STEPS] * 4
        assert backend.engine is not None
        planned = backend.engine.graphs[0].planned
        assert planned is not None
        reruns = [
            planned.problem.trace.ops[x.action.op].target
            for x in planned.program.body
            if isinstance(x.action, Run) and x.action.again
        ]
        assert any("batch_norm" in target for target in reruns)

    @pytest.mark.parametrize(
        "loss_of",
        [
            lambda y: y.sum(),
            lambda y: (y.t() * torch.arange(256.0)).sum(),
            lambda y: y[::2, 1::3].square().sum(),
            lambda y: y.expand(3, *y.shape).sum() + y[0, 0],
            lambda y: y.t().contiguous().cumsum(0).sum(),
        ],
        ids=["expanded", "transposed", "strided", "broadcast", "scan"],
    )
    def test_tangents_of_any_layout(self, loss_of: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        module, plain = Positions(-1), Positions(-1)
        plain.load_state_dict(module.state_dict())
        x = torch.rand(256, WIDTH)
        call, _ = compiled(module)
        seen = train(module, call, [x], loss_of, STEPS)
        assert same(seen, train(plain, plain, [x], loss_of, STEPS))

    def test_outputs_of_every_kind(self) -> None:
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)
                self.scale = nn.Parameter(torch.tensor(2.0))

            def forward(self, x: Tensor, empty: Tensor) -> dict[str, Any]:
                y = torch.tanh(self.layer(x)) * self.scale + torch.tensor([1.0] * 8)
                pair = (y.t(), y[:, ::2], y.detach())
                empty = torch.tanh(empty * self.scale)
                inputs = (x, x.view(-1), x.detach())
                return {"y": y, "none": None, "n": 3, "pair": pair, "0": empty, "in": inputs}

        def run(call: Any, module: nn.Module) -> list[list[Tensor]]:
            seen = []
            for step in range(STEPS):
                module.zero_grad()
                x = batch(step, 2, 8).view(-1, 8).requires_grad_()
                out = call(x, torch.ones(0, 4))
                assert out["none"] is None
                assert out["n"] == 3
                assert [t.requires_grad for t in out["in"]] == [True, True, False]
                assert not out["pair"][2].requires_grad
                tensors = (out["y"], *out["pair"], out["0"], *out["in"])
                torch.stack([t.square().sum() for t in tensors]).sum().backward()
                assert x.grad is not None
                seen.append([x.grad, *snapshot(module, out["y"])])
            return seen

        torch.manual_seed(0)
        module, plain = Many(), Many()
        plain.load_state_dict(module.state_dict())
        call, _ = compiled(module)
        assert same(run(call, module), run(plain, plain))

    @pytest.mark.parametrize(
        "kinds",
        [
            ("flat", "detached"),
            ("left", "right", "detached"),
            ("all", "detached, transposed"),
            ("flat", "all", "detached", "detached, transposed"),
            ("detached", "detached again", "left"),
            ("later", "flat", "detached"),
        ],
        ids=" and ".join,
    )
    def test_outputs_that_are_one_tensor(self, kinds: tuple[str, ...]) -> None:
        """Autograd is told which outputs have gradients by objects, and two may be one otherwise.

        Then nothing before them is trained.
        """
        of: dict[str, Callable[[Tensor], Tensor]] = {
            "all": lambda y: y,
            "flat": lambda y: y.flatten(),
            "left": lambda y: y[:, :4],
            "right": lambda y: y[:, 4:],
            "later": lambda y: y.tanh(),
            "detached": lambda y: y.detach(),
            "detached again": lambda y: y.detach().detach(),
            "detached, transposed": lambda y: y.detach().t(),
        }

        class Several(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> list[Tensor]:
                y = self.layer(x).sin()
                return [of[kind](y) for kind in kinds]

        def run(call: Any, module: nn.Module) -> list[list[Tensor]]:
            seen = []
            for step in range(STEPS):
                module.zero_grad()
                found = call(batch(step, 2, 8).view(-1, 8))
                trained = [t for t in found if t.requires_grad]
                assert len(trained) == sum(not kind.startswith("detached") for kind in kinds)
                torch.stack([t.square().sum() for t in trained]).sum().backward()
                seen.append(snapshot(module, torch.cat([t.detach().flatten() for t in found])))
                for kind, t in zip(kinds, found, strict=True):
                    assert not (kind.startswith("detached") and t._base is not None) or (
                        not t._base.requires_grad
                    ), "it would keep the graph"
            return seen

        torch.manual_seed(0)
        module, plain = Several(), Several()
        plain.load_state_dict(module.state_dict())
        call, _ = compiled(module)
        assert same(run(call, module), run(plain, plain))

    def test_the_default_dtype_of_forward_holds_where_its_ops_run_again(self) -> None:
        """Quotients of integers have the default dtype, which some libraries set around forward."""

        class Placed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

            def forward(self, x: Tensor) -> Tensor:
                places = torch.arange(x.numel()).view_as(x)
                for i, layer in enumerate(self.layers):
                    x = (
                        torch.tanh(torch.relu(layer(x)) * ((places + i) / (3 * x.numel())))
                        + x.sin()
                    )
                return x

        def run(call: Any, module: nn.Module) -> list[Away]:
            seen = []
            for step in range(STEPS):
                module.zero_grad()
                seeded = torch.Generator().manual_seed(step)
                x = torch.randn(1024, 64, generator=seeded, dtype=torch.float64)
                torch.set_default_dtype(torch.float64)
                try:
                    found = call(x)
                finally:
                    torch.set_default_dtype(torch.float32)
                loss = found.square().mean()
                del found
                loss.backward()
                seen.append(away(snapshot(module, loss.detach())))
                del loss
            return seen

        torch.manual_seed(0)
        module, plain = Placed().double(), Placed().double()
        plain.load_state_dict(module.state_dict())
        backend = Backend(budget="10MiB", policy="recompute-all")
        found = run(torch.compile(module, backend=backend), module)
        assert backend.report().state == "planned"
        assert same(list(map(back, found)), list(map(back, run(plain, plain))))

    def test_a_strided_argument_at_another_offset(self) -> None:
        module = nn.Linear(WIDTH, WIDTH)
        call, _ = compiled(module)
        stack = torch.randn(3, WIDTH, WIDTH)
        for step in range(STEPS):
            x = stack[step % 3].t()
            module.zero_grad()
            call(x).square().sum().backward()
            mine = snapshot(module, x)
            module.zero_grad()
            module(x).square().sum().backward()
            assert same([mine], [snapshot(module, x)])

    def test_a_view_as_another_dtype_at_another_offset(self) -> None:
        class Real(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(4, 4, 2))

            def forward(self, x: Tensor) -> Tensor:
                return torch.view_as_real(x) * self.w

        module = Real()
        call, _ = compiled(module)
        stack = torch.randn(2, 4, 4, dtype=torch.complex64)
        for x in stack:
            module.zero_grad()
            call(x).sum().backward()
            assert module.w.grad is not None
            assert torch.equal(module.w.grad, torch.view_as_real(x))

    def test_layer_norm_of_a_permuted_input(self) -> None:
        """torch describes its gradient as laid out like the input; kernels make it contiguous."""
        torch.manual_seed(0)
        x = torch.randn(2, 4, 16, 16, 16)
        budget = below_in_core(Rearranged(), [x])
        torch.manual_seed(0)
        module = Rearranged()
        traced = torch.compile(module, backend="aot_eager")
        expected = train(module, traced, [x], mean_square, STEPS)
        torch.manual_seed(0)
        module = Rearranged()
        call, backend = compiled(module, budget=budget, strict=True)
        assert same(train(module, call, [x], mean_square, STEPS), expected)
        assert moved(backend)

    def test_writes_into_slices_of_slices(self) -> None:
        """The result is a view of a copy of the storage; torch does not describe it as a view."""

        class Framed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                frame = torch.zeros(ROWS, WIDTH)
                for rows in (slice(-700), slice(-700, -300), slice(-300, None)):
                    for columns in (slice(-40), slice(-40, -20), slice(-20, None)):
                        frame[rows][:, columns] = self.layer(x)[rows][:, columns].relu()
                return frame * x

        torch.manual_seed(0)
        module, x = Framed(), torch.randn(ROWS, WIDTH)
        call, backend = compiled(module, strict=True)
        for _ in range(STEPS):
            module.zero_grad()
            mine = call(x)
            mean_square(mine).backward()
            seen = snapshot(module, mine)
            module.zero_grad()
            plain = module(x)
            mean_square(plain).backward()
            assert same([seen], [snapshot(module, plain)])
        assert backend.report().state == "in-core"


IN_PLACE = r"in-?place|in place"


class TestChangedInPlace:
    """In-place changes that plain PyTorch refuses must not give other gradients here."""

    def test_a_weight_read_through_a_view(self) -> None:
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        call, _ = compiled(module)
        loss = call(torch.ones(4, 8, requires_grad=True)).sum()
        with torch.no_grad():
            list(module.parameters())[2].mul_(3)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()

    @pytest.mark.parametrize("detached", [True, False])
    def test_an_output_that_backward_reads(self, detached: bool) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = torch.tanh(self.layer(x))
                return (y.detach() if detached else y), y * 2

        call, _ = compiled(Two())
        y, z = call(torch.ones(4, 8))
        with torch.no_grad():
            y.zero_()
        with pytest.raises(RuntimeError, match=IN_PLACE):
            z.sum().backward()

    @pytest.mark.xfail(strict=True, reason="_unsafe_view becomes a view", raises=RuntimeError)
    def test_an_output_may_be_changed_as_in_plain_torch(self) -> None:
        module = nn.Linear(8, 8, bias=False)
        call, _ = compiled(module)
        y = call(torch.ones(4, 2, 8))
        y.mul_(2)
        y.sum().backward()
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, torch.full((8, 8), 16.0))


class TestLeaks:
    def test_live_bytes_are_flat(self) -> None:
        module = Small()
        call, backend = compiled(module, budget=TIGHT)

        def held() -> int:
            gc.collect()
            return resident_bytes(CPU)

        for _ in range(STEPS + 2):
            call(batch(0)).sum().backward()
        before = held()
        for _ in range(30):
            call(batch(0)).sum().backward()
        assert held() == before
        for _ in range(20):
            call(batch(0))
        assert held() == before
        assert backend.engine is not None
        assert len(backend.engine.stores) == 0

    def test_forwards_without_backward_leave_no_notes(self) -> None:
        call, backend = compiled(nn.Linear(8, 8))
        sizes = []
        for _ in range(24):
            call(torch.ones(4, 8))
            assert backend.engine is not None
            profiling = backend.engine.graphs[0].profiling
            assert profiling is not None
            sizes.append(sum(map(len, profiling.checks.stopwatch.notes.values())))
        assert sizes[18] == sizes[-1]

    def test_checkpoint_around_a_compiled_module(self) -> None:
        module = Positions(-1)
        call, backend = compiled(module)
        for _ in range(3):
            x = torch.rand(8, WIDTH, requires_grad=True)
            torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False).sum().backward()
        gc.collect()
        assert backend.engine is not None
        backend.engine.metering.end()
        assert len(backend.engine.stores) == 0


class Host(nn.Module):
    """Cannot be planned: a size depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x > 0).sum() * x.sum()


ONE_STEP = """
import torch
from outcore import Backend
call = torch.compile(torch.nn.Linear(8, 8), backend=Backend(budget="1GiB"))
call(torch.ones(2, 8)).sum().backward()
"""


class TestCompiledAutograd:
    """Compiled autograd copies the backward call that AOTAutograd saw; outcore runs another."""

    def enabled(self) -> Any:
        return compiled_autograd._enable(torch.compile(backend="eager"))

    def test_enabled_before_it_runs_in_core(self) -> None:
        torch.manual_seed(0)
        module, plain = Positions(-1), Positions(-1)
        plain.load_state_dict(module.state_dict())
        call, _ = compiled(module)
        x = torch.rand(8, WIDTH)
        with self.enabled(), pytest.warns(UserWarning, match="compiled autograd is enabled"):
            seen = train(module, call, [x], mean_square, 2)
        assert same(seen, train(plain, plain, [x], mean_square, 2))

    def test_enabled_later_it_is_refused(self) -> None:
        module = Positions(-1)
        call, backend = compiled(module)
        loss = mean_square(call(torch.rand(8, WIDTH)))
        with self.enabled(), pytest.raises(RuntimeError, match="before it was enabled"):
            loss.backward()
        del loss
        module.zero_grad()
        mean_square(call(torch.rand(8, WIDTH))).backward()
        gc.collect()
        assert backend.engine is not None
        assert len(backend.engine.stores) == 0


class TestThreads:
    @pytest.fixture(autouse=True)
    def nothing_else_is_metered(self) -> None:
        """Stop the meter that an earlier test may have left running: a process has only one."""
        for session in list(_running.values()):
            session.stop()

    @pytest.mark.parametrize("before", [0, 2])
    def test_backward_on_another_thread_runs_in_core(self, before: int) -> None:
        """The meter sees one thread only: a plan from half of a step could break the budget."""
        (expected,) = small_reference(1)
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, budget="1GiB")
        start = copy.deepcopy(module.state_dict())
        for _ in range(before):
            mean_square(call(batch(0))).backward()
        module.load_state_dict(start)

        def step() -> list[Tensor]:
            torch.manual_seed(0)
            module.zero_grad()
            loss = mean_square(call(batch(0)))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return snapshot(module, loss)

        with pytest.warns(UserWarning, match="another thread than its forward"):
            assert same([step()], [expected])
        planless = step()
        # Without the running statistics, which move on with each step.
        assert same([planless[:-3]], [expected[:-3]])
        assert backend.report().state == "unplanned"

    def test_a_plan_s_steps_are_timed_if_backward_runs_on_another_thread(self) -> None:
        """So a drift of their times is seen. A meter, which sees forward alone, would slow them."""
        call, backend = compiled(Small(), budget="1GiB")
        for _ in range(2 * STEPS):
            mean_square(call(batch(0))).backward()
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        before = graph.status.times.steps
        for _ in range(3):
            loss = mean_square(call(batch(0)))
            assert backend.engine.metering.running is None
            run_in_threads(loss.backward)
        assert backend.report().state == "in-core"
        assert graph.status.times.steps == before + 3

    @pytest.mark.parametrize("when", ["at first", "again"])
    def test_draws_of_another_thread_are_an_error_where_dropout_runs_again(self, when: str) -> None:
        """The recomputed mask would differ, and gradients would be wrong."""
        module, x = Positions(ALL), torch.rand(ROWS, WIDTH)
        call, backend = compiled(module, budget=below_in_core(module, [x]), policy="recompute-all")
        for _ in range(STEPS):
            module.zero_grad()
            mean_square(call(x)).backward()
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        assert graph.executable is not None
        names = (
            graph.executable.forward if when == "at first" else graph.executable.backward
        ).__globals__
        verb = "generator_state" if when == "at first" else "restore_generator"
        as_it_is = names[verb]

        def disturbed(*states: Tensor) -> Any:
            state = as_it_is(*states)
            torch.rand(1)  # as if another thread drew at that moment
            return state

        def step() -> Tensor:
            torch.manual_seed(0)
            module.zero_grad()
            loss = mean_square(call(x))
            names[verb] = as_it_is
            if when == "again":
                names[verb] = disturbed
            loss.backward()
            return loss

        names[verb] = disturbed
        with pytest.raises(StepError, match="another thread draws"):
            step()
        names[verb] = as_it_is
        gc.collect()
        assert len(backend.engine.stores) == 0

    @pytest.mark.filterwarnings("ignore:Leaked callback handle")
    def test_two_that_drop_out_at_once_draw_one_after_the_other(self, tmp_path: Path) -> None:
        """Both recompute dropout, and draw from the same generator."""
        again = tmp_path / "overrides.json"
        again.write_text('[{"match": "native_dropout*", "action": "recompute"}]')
        modules = [Positions(ALL), Positions(ALL)]
        x = torch.rand(ROWS, WIDTH)
        backends = [Backend(budget="1GiB", overrides=str(again)) for _ in modules]
        torch._dynamo.reset()
        seen: list[float] = []

        def train_on(module: nn.Module, backend: Backend) -> None:
            call = torch.compile(module, backend=backend)
            for _ in range(40):
                module.zero_grad()
                loss = mean_square(call(x))
                loss.backward()
                for w in module.parameters():
                    assert w.grad is not None
                    seen.append(float((w.grad * w.detach()).sum() / (2 * loss.detach())))

        pairs = zip(modules, backends, strict=True)
        run_in_threads(*(partial(train_on, *pair) for pair in pairs))
        assert all(backend.report().counts.recompute for backend in backends)
        assert len(seen) == 2 * 40 * LAYERS
        assert max(abs(each - 1) for each in seen) < 1e-4

    @pytest.mark.filterwarnings("ignore:Leaked callback handle")
    def test_each_step_on_another_thread_runs_in_core(self) -> None:
        """A meter can be read only on the thread that started it."""
        steps = Obstacle.OTHER_THREADS.most + 3
        expected = small_reference(steps)
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, budget="1GiB")
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        seen: list[list[Tensor]] = []

        def step() -> None:
            torch.manual_seed(len(seen))
            optimizer.zero_grad()
            loss = mean_square(call(batch(0)))
            loss.backward()
            seen.append(snapshot(module, loss))
            optimizer.step()

        def all_steps() -> None:
            for _ in range(steps):
                run_in_threads(step)

        with pytest.warns(UserWarning, match="each of its steps runs on another thread"):
            all_steps()
        assert same(seen, expected)
        assert backend.report().state == "unplanned"

    @pytest.mark.filterwarnings("ignore:Leaked callback handle")
    def test_a_step_on_a_thread_that_idles_is_not_waited_for_in_silence(self) -> None:
        """The idle thread's meter runs until its next step or its end; there can be only one."""
        x, ended, idle = torch.randn(8, WIDTH), threading.Event(), threading.Event()
        module = Stacked()
        call, backend = compiled(module, budget="1GiB")

        def work() -> None:
            mean_square(call(x)).backward()
            idle.set()
            ended.wait()

        def train_on() -> None:
            for _ in range(Obstacle.METERED_ELSEWHERE.most + 1):
                mean_square(call(x)).backward()

        thread = threading.Thread(target=work)
        thread.start()
        idle.wait()
        try:
            with pytest.warns(UserWarning, match="a step on another thread is being metered"):
                train_on()
        finally:
            ended.set()
            thread.join()
        assert backend.report().state == "unplanned"

    @pytest.mark.skipif(
        "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
        reason="before 2.13 torch cannot compile on one thread while another runs what it compiled",
    )
    @pytest.mark.filterwarnings("ignore:Leaked callback handle")
    @pytest.mark.parametrize("shared", [False, True])
    def test_two_that_train_at_once(self, shared: bool) -> None:
        """A process can run only one profiler at a time."""
        torch.manual_seed(0)
        modules = [Stacked(), Stacked()]
        plain = [copy.deepcopy(module) for module in modules]
        x, steps = torch.randn(ROWS, WIDTH), PROFILED_STEPS + 20
        torch._dynamo.reset()
        both = Backend(budget="1GiB", policy="swap-all")
        calls = [
            torch.compile(m, backend=both if shared else Backend(budget="1GiB", policy="swap-all"))
            for m in modules
        ]
        losses: dict[int, list[float]] = {}

        def trained(call: Callable[[Tensor], Tensor], module: nn.Module) -> list[float]:
            seen, optimizer = [], torch.optim.SGD(module.parameters(), lr=1e-3)
            for _ in range(steps):
                optimizer.zero_grad()
                loss = mean_square(call(x))
                loss.backward()
                seen.append(loss.item())
                optimizer.step()
            return seen

        def job(index: int) -> Callable[[], None]:
            def run() -> None:
                losses[index] = trained(calls[index], modules[index])

            return run

        run_in_threads(*map(job, range(2)))
        assert [losses[0], losses[1]] == [trained(module, module) for module in plain]

    def test_counting_tensors_leaves_the_tuples_of_other_threads_alone(self) -> None:
        """Python cannot finish a tuple if other code holds a reference to it meanwhile."""
        done, broken = threading.Event(), threading.Event()

        def make() -> None:
            while not done.is_set():
                try:
                    tuple(number for number in range(200))
                except SystemError:
                    broken.set()
                    return

        def count() -> None:
            held = [torch.ones(1000) for _ in range(3)]
            for _ in range(20):
                assert resident_bytes(CPU, ledger=None) >= sum(t.nbytes for t in held)
            done.set()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            run_in_threads(make, make, make, make, count)
        finally:
            sys.setswitchinterval(interval)
            done.set()
        assert not broken.is_set()


def test_counting_tensors_leaves_the_gradients_of_other_threads_alone() -> None:
    """Reading a gradient while it is freed would end the process, so this uses another one."""
    code = """
import threading
import torch
from outcore.measure import resident_bytes

done = threading.Event()

def work():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(60)])
    while not done.is_set():
        model.zero_grad()
        model(torch.ones(4, 8)).sum().backward()

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(300):
    resident_bytes(torch.device("cpu"))
done.set()
for thread in threads:
    thread.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gradients_that_nobody_asked_for_are_counted() -> None:
    code = """
import threading
import torch
from outcore.measure import resident_bytes

cpu = torch.device("cpu")
used, other = torch.ones(1000, requires_grad=True), torch.ones(100, requires_grad=True)
before = resident_bytes(cpu), resident_bytes(cpu, [used])
(used.sum() + other.sum()).backward()
after = resident_bytes(cpu), resident_bytes(cpu, [used])
assert [b - a for a, b in zip(before, after)] == [4400, 4400], (before, after)
used, other = torch.ones(1000, requires_grad=True), torch.ones(100, requires_grad=True)
done = threading.Event()
threading.Thread(target=done.wait).start()
before = resident_bytes(cpu, [used])
(used.sum() + other.sum()).backward()
after = resident_bytes(cpu, [used])
done.set()
assert after - before == 4000, "beside another thread, of what is used by this one"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counting_tensors_runs_no_code_of_auditors() -> None:
    """Hooks would let other threads run. They cannot be removed: this uses another process."""
    code = """
import sys
sys.addaudithook(lambda *_: None)
from tests.cpu.test_pitfalls import TestThreads
for _ in range(3):
    TestThreads().test_counting_tensors_leaves_the_tuples_of_other_threads_alone()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_view_that_may_not_be_used_any_more_is_counted() -> None:
    before = resident_bytes(CPU)
    base = torch.ones(1000, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
        _ = view.is_leaf
    del base  # the view alone keeps the memory now
    assert resident_bytes(CPU) >= before + view.nbytes


def run_in_threads(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class SmallThenLarge(nn.Module):
    """Two graphs: the first one keeps little compared with what the second one would."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.rest = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        for layer in self.rest:
            x = torch.tanh(layer(x))
        return x


class Stacked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


class TestEnd:
    def test_a_program_may_end_after_one_step(self) -> None:
        ended = subprocess.run([sys.executable, "-c", ONE_STEP], capture_output=True, check=False)
        assert ended.returncode == 0


class TestBadInput:
    def test_an_unknown_option_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(OptionError, match="did you mean 'budget'"):
            Backend(budgt="1GiB")  # type: ignore[call-arg]  # refused by mypy as well
        call = torch.compile(nn.Linear(2, 2), backend="outcore", options={"polcy": "pooch"})
        with pytest.raises(OptionError, match="did you mean 'policy'") as caught:
            call(torch.ones(1, 2))
        assert caught.value.option == "polcy"

    @pytest.mark.parametrize("budget", ["-1GiB", -1, "plenty", "0B", 0, "12 parsecs"])
    def test_a_budget_that_cannot_be(self, budget: str | int) -> None:
        with pytest.raises(BudgetError, match="budget"):
            Backend(budget=budget)

    def test_a_missing_budget_on_a_cpu(self) -> None:
        torch._dynamo.reset()
        call = torch.compile(nn.Linear(2, 2), backend=Backend())
        with pytest.raises(BudgetError, match="you must set the budget") as caught:
            call(torch.ones(1, 2))
        printed = "".join(traceback.format_exception_only(caught.value))
        assert printed.startswith("outcore.errors.BudgetError: option budget=None")
        twin = pickle.loads(pickle.dumps(caught.value))
        assert type(twin) is BudgetError
        assert str(twin) == caught.value.message

    @pytest.mark.parametrize("kind", [SpillError, PolicyError, VerifyError])
    def test_any_error_passes_through_dynamo(self, kind: type[OutcoreError]) -> None:
        given: dict[str, Any] = {f.name: f.name for f in fields(kind) if "bytes" not in f.name}  # type: ignore[arg-type]  # a dataclass
        error = kind(**given)

        def backend(*_: Any) -> Any:
            with passing():
                raise error

        with pytest.raises(kind) as caught:
            torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
        assert str(caught.value).startswith(error.message)
        assert getattr(caught.value, "__notes__", []) == getattr(error, "__notes__", [])

    @pytest.mark.parametrize("policy", ["pouch", "pooch{", "pooch{nothing=1}"])
    def test_a_policy_that_is_none(self, policy: str) -> None:
        with pytest.raises(PolicyError):
            Backend(budget="1GiB", policy=policy)

    def test_a_spill_folder_that_will_not_do(self, tmp_path: Path) -> None:
        module = Small()
        for folder in (tmp_path / "missing", tmp_path / "file"):
            if folder.name == "file":
                folder.write_text("")
            with pytest.raises(SpillError, match=f"{folder}': it (is not a dir|does not exist)"):
                compiled(module, budget=TIGHT, spill_dir=folder)

    def test_a_budget_below_the_floor(self) -> None:
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, budget="64KiB")
        with pytest.raises(InfeasibleError, match="smallest feasible budget"):
            call(batch(0))
        assert backend.engine is not None
        assert len(backend.engine.stores) == 0
        torch._dynamo.reset()
        torch.manual_seed(0)
        again = Small()
        module.load_state_dict(again.state_dict())
        seen = train(module, module, [batch(0)], mean_square, 2)
        assert same(seen, small_reference(2, eager=True))

    def test_the_budget_that_the_error_names_is_enough(self) -> None:
        module = Small()
        call, _ = compiled(module, budget="64KiB")
        with pytest.raises(InfeasibleError) as caught:
            call(batch(0))
        enough = str(caught.value).split('well above "')[1].split('"')[0]
        del caught, call  # the traceback holds the batch
        gc.collect()
        call, backend = compiled(module, budget=enough)
        call(batch(0)).sum().backward()
        assert backend.report().state == "profiling"

    def test_what_the_errors_name_is_reached_in_two_steps(self) -> None:
        """One error before workspaces are known, one after. The floors include the margin."""
        torch.manual_seed(0)
        x, budget, refused = torch.randn(ROWS, WIDTH), 128 << 10, 0
        while True:
            module = Stacked()
            call, _ = compiled(module, budget=budget, policy="search{effort=0.5}")
            try:
                for _ in range(STEPS):
                    module.zero_grad()
                    mean_square(call(x)).backward()
            except InfeasibleError as error:
                refused, budget = refused + 1, error.floor_bytes
            else:
                break
            assert refused <= 2
            del call
            gc.collect()
        assert refused > 0

    def test_with_later_graphs_it_is_reached_in_two_steps_too(self) -> None:
        """What later graphs are left grows with the budget, up to what they can use."""
        refused, budget = 0, 1_000_000
        while True:
            torch.manual_seed(0)
            module = SmallThenLarge()
            call, _ = compiled(module, budget=budget, policy="pooch")
            try:
                for _ in range(STEPS):
                    module.zero_grad()
                    mean_square(call(torch.randn(512, 64))).backward()
            except InfeasibleError as error:
                refused, budget = refused + 1, error.floor_bytes
            else:
                break
            assert refused <= 2
            del call
            gc.collect()
        assert refused > 0

    def test_an_infeasible_policy_has_its_name(self) -> None:
        sizes: dict[str, Any] = {"budget_bytes": 1024, "floor_bytes": 4096, "needed_bytes": 2048}
        error = InfeasibleError(op="op 7", policy="swap-all", **sizes)
        assert "at once under policy swap-all" in str(error)
        assert "another policy" in str(error)
        assert "policy" not in str(InfeasibleError(op="op 7", **sizes))

    def test_strict_refuses_what_cannot_be_planned(self) -> None:
        call, _ = compiled(Host(), strict=True)
        x = torch.ones(3, requires_grad=True)
        with (
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
            pytest.raises(CaptureError, match="cannot plan this graph"),
        ):
            call(x)


class Weighed(torch.autograd.Function):
    """Its backward begins with ops that do not need the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        weighed: Tensor = (x.repeat(4, 1) * 3).sum() * gradient
        return weighed


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Weighed.apply(self.layers(x).tanh())
        return found


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
def test_a_backward_that_somebody_wrote() -> None:
    runs = []
    tight = tight_budget(Weighing(), [torch.ones(ROWS, WIDTH)], mean_square, 0.6)
    for budget in (tight, "1GiB", None):  # results of one run count as resident in the next
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Weighing()
        call = module if budget is None else compiled(module, budget=budget)[0]
        runs.append(train(module, call, [torch.ones(ROWS, WIDTH)], mean_square, STEPS))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


class Jittered(Weighed):
    """Its backward draws before it reads the incoming gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        return gradient * torch.rand_like(x)


class Jittering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Jittered.apply(self.layer(x).tanh())
        return found


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # as above
def test_a_backward_draws_after_the_loss() -> None:
    def loss_of(y: Tensor) -> Tensor:
        return mean_square(F.dropout(y, 0.5))

    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Jittering()
        call = module if backend is None else torch.compile(module, backend=backend)
        return train(module, call, [torch.ones(8, WIDTH)], loss_of, STEPS)

    assert same(trained(Backend(budget="1GiB", strict=True)), trained(None))


class TestCheckpointAround:
    """`torch.utils.checkpoint` around a compiled call runs its forward call again in backward."""

    def trained(self, budget: int, *, reentrant: bool, steps: int) -> tuple[Backend, list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Stacked()
        backend = Backend(budget=budget, policy="swap-all{min_bytes=1B}")
        call = torch.compile(module, backend=backend)
        for _ in range(steps):
            module.zero_grad()
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            checkpoint(call, x, use_reentrant=reentrant).square().mean().backward()
        return backend, [p.grad for p in module.parameters() if p.grad is not None]

    def test_what_the_first_call_began_is_over_before_the_second(self) -> None:
        def loss_of(y: Tensor) -> Tensor:
            return y.square().mean()

        torch.manual_seed(0)
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        budget = tight_budget(Stacked(), [x], loss_of, 0.5)
        del x
        backend, gradients = self.trained(budget, reentrant=False, steps=STEPS + 4)
        report = backend.report()
        assert report.state == "planned"
        assert report.counts.offload
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
        assert same([gradients], [self.trained(1 << 30, reentrant=False, steps=1)[1]])

    def test_a_block_that_is_called_many_times_is_planned(self) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Linear(WIDTH, WIDTH)
        backend = Backend(budget=1 << 30, strict=True)
        call = torch.compile(module, backend=backend)
        for _ in range(STEPS + 4):
            module.zero_grad()
            y = torch.ones(8, WIDTH, requires_grad=True)
            for _ in range(12):
                y = checkpoint(call, y, use_reentrant=False)
            mean_square(y).backward()
        assert backend.report().state == "in-core"
        assert backend.report().predicted_peak_bytes is not None

    def test_a_reentrant_one_runs_in_core(self) -> None:
        with pytest.warns(UserWarning, match="inside a backward call"):
            backend, _ = self.trained(
                1 << 30, reentrant=True, steps=Obstacle.INSIDE_BACKWARD.most + 2
            )
        assert backend.report().state == "unplanned"


class Normalized(nn.Module):
    """Checkpointed blocks, each with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_batch_norm_inside_a_checkpoint() -> None:
    """torch's graph saves the running statistics, which are overwritten after the forward call."""

    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Normalized()
        return train(module, torch.compile(module, backend=backend), images, mean_square, STEPS)

    images = [batch(0)]
    assert same(trained(Backend(budget="1GiB", strict=True)), trained("aot_eager"))


def test_batched_gradients_are_refused() -> None:
    module = Stacked()
    call, _ = compiled(module)
    y = call(torch.ones(ROWS, WIDTH))
    with pytest.raises(StepError, match="is_grads_batched=True"):
        torch.autograd.grad(
            y, list(module.parameters()), torch.ones(3, ROWS, WIDTH), is_grads_batched=True
        )
