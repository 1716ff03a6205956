"""Backend: results equal plain PyTorch's, graphs and memory are released, steps are metered."""

from __future__ import annotations

import copy
import gc
import io
import linecache
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._dynamo.eval_frame import innermost_backend
from torch.profiler import ProfilerActivity, profile

from outcore import Backend
from outcore.errors import CaptureError, OptionValueError, StepError
from outcore.ir.hardware import Tier
from outcore.ir.margin import MARGIN_DIVISOR
from outcore.ir.memory import peak
from outcore.ir.plan import KEEP_ALL
from outcore.ir.trace import Effect, Ref, Role
from outcore.lower import lower
from outcore.measure import metered
from outcore.policies import floor
from outcore.runtime.budget import steps
from outcore.runtime.budget.metering import MOST_PEAK_TRIES
from outcore.runtime.budget.registry import IDLE_STEPS
from outcore.runtime.graphs.calls import states_bytes
from outcore.runtime.graphs.recording import LONGEST_RECORDING
from outcore.runtime.graphs.status import MOST_STEPS_WITHOUT_BACKWARD, GraphStatus
from outcore.runtime.step import store
from outcore.runtime.step.metered_step import MeteredStep
from outcore.torch_backend import backend_for
from tests.cpu.training import (
    PROFILED_STEPS,
    Broken,
    Small,
    away,
    back,
    batch,
    mean_square,
    same,
    small_planned,
    small_reference,
    snapshot,
    tight_budget,
    train,
)
from tests.pure.building import TraceBuilder, dense_problem, small_trace

STEPS = PROFILED_STEPS + 2
TIGHT = "2MiB"
"""A budget too small to keep everything of `Small` at batch 4."""
ROOM_FOR_ONE = "2.6MiB"
"""A budget in which one half of a network fits in-core, but then not the other half."""
MOVING = ("swap-all", "swap-all-naive", "recompute-all", "swap-opt", "pooch")


def compiled(module: nn.Module, **options: Any) -> tuple[Any, Backend]:
    torch._dynamo.reset()
    given: dict[str, Any] = {"budget": TIGHT, "policy": "swap-all", **options}
    backend = Backend(**given)
    return torch.compile(module, backend=backend), backend


def outstanding(backend: Backend) -> int:
    gc.collect()
    assert backend.engine is not None
    return len(backend.engine.stores)


class TestResults:
    @pytest.mark.parametrize("policy", MOVING)
    def test_every_policy_is_bitwise_equal(self, policy: str) -> None:
        seen, backend = small_planned(STEPS, budget=TIGHT, policy=policy)
        report = backend.report()
        assert report.state == "planned"
        assert report.counts.offload + report.counts.recompute > 0
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
        assert same(seen, small_reference(STEPS))
        assert same(seen, small_reference(STEPS, eager=True))

    def test_what_fits_is_left_alone(self) -> None:
        seen, backend = small_planned(STEPS, budget="1GiB", policy="swap-all")
        report = backend.report()
        assert report.state == "in-core"
        assert report.offloaded_bytes == 0
        assert same(seen, small_reference(STEPS))

    def test_where_all_fits_nothing_is_written(self) -> None:
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, budget="1GiB", policy="swap-all")
        written = []
        for _ in range(STEPS):
            call(batch(0)).sum().backward()
            assert backend.engine is not None
            written.append(backend.engine.driver.disk_bytes_written())
        assert backend.report().state == "in-core"
        assert written[PROFILED_STEPS - 2] == written[-1]

    def test_by_name_with_options(self) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Small()
        options: dict[str, Any] = {"budget": TIGHT, "policy": "swap-all"}
        call = torch.compile(module, backend="outcore", options=options)
        seen = train(module, call, [batch(0)], mean_square, STEPS)
        assert same(seen, small_reference(STEPS))
        backend = backend_for(options)
        assert backend.report().state == "planned"
        assert backend_for(options) is backend
        backend.close()
        assert not backend_for(options).closed


@pytest.mark.parametrize("asked", [{"mode": "max-autotune"}, {"options": {"budget": "2MiB"}}])
def test_what_torch_compile_is_given_beside_a_backend(asked: dict[str, Any]) -> None:
    torch._dynamo.reset()
    call = torch.compile(Small(), backend=Backend(budget=TIGHT), **asked)
    with pytest.raises(OptionValueError, match=r"option mode=|option options="):
        call(batch(0))


def test_a_mode_by_name() -> None:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTCORE_BUDGET", "2MiB")
        call = torch.compile(Small(), backend="outcore", mode="max-autotune")
        with pytest.raises(OptionValueError, match="only Inductor has modes"):
            call(batch(0))


def test_room_for_the_states_of_generators() -> None:
    """Two per random op that may be rerun, and two during a rerun."""
    t = TraceBuilder()
    x = t.new(64, Role.INPUT, borrowed=True)
    made = [t.new(64, Role.ACTIVATION) for _ in range(3)]
    for buffer, effects in zip(made, ([Effect.RANDOM], [Effect.RANDOM], []), strict=True):
        t.op("f", (Ref(x),), (buffer,), effects=effects)
    assert states_bytes(t.trace([x], (Ref(made[-1]),)), 5000) == 6 * 5000
    assert states_bytes(small_trace(), 5000) == 4 * 5000
    assert states_bytes(dense_problem().trace, 5000) == 0


class TestLives:
    """A store lives exactly as long as its autograd graph."""

    def test_after_backward_nothing_is_left(self) -> None:
        _, backend = small_planned(STEPS, budget=TIGHT, policy="swap-all")
        assert outstanding(backend) == 0

    def test_an_output_dropped_without_backward(self) -> None:
        module = Small()
        call, backend = compiled(module)
        for _ in range(STEPS):
            call(batch(0)).sum().backward()
        output = call(batch(0))
        assert outstanding(backend) == 1
        del output
        assert outstanding(backend) == 0

    def test_dropped_while_profiling(self) -> None:
        call, backend = compiled(Small())
        for _ in range(4):
            call(batch(0))
        assert outstanding(backend) == 0
        call(batch(0)).sum().backward()
        assert outstanding(backend) == 0

    @pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
    def test_retain_graph_gives_the_same_gradients_again(self, policy: str) -> None:
        module = Small()
        call, backend = compiled(module, policy=policy)
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = call(batch(step)).sum()
            grads = []
            for retain in (True, True, False):
                module.zero_grad()
                loss.backward(retain_graph=retain)
                grads.append(snapshot(module, loss))
            assert same(grads[:1], grads[1:2])
            assert same(grads[:1], grads[2:])
            with pytest.raises(RuntimeError, match="retain_graph"):
                loss.backward()
        del loss
        assert outstanding(backend) == 0

    @pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
    def test_two_outstanding_forwards(self, policy: str) -> None:
        def both(call: Any, module: nn.Module, steps: int) -> list[list[Tensor]]:
            seen = []
            for step in range(steps):
                torch.manual_seed(step)
                module.zero_grad()
                first, second = call(batch(1)).sum(), call(batch(2)).sum()
                first.backward()
                second.backward()
                seen.append(snapshot(module, first + second))
            return seen

        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, policy=policy, budget="5MiB")
        seen = both(call, module, STEPS + 2)
        assert outstanding(backend) == 0
        torch.manual_seed(0)
        plain = Small()
        assert same(seen, both(plain, plain, STEPS + 2))

    def test_gradient_accumulation(self) -> None:
        def accumulate(call: Any, module: nn.Module) -> list[list[Tensor]]:
            seen = []
            for step in range(STEPS):
                torch.manual_seed(step)
                loss = call(batch(step)).square().sum()
                loss.backward()
                seen.append(snapshot(module, loss))
            return seen

        torch.manual_seed(0)
        module = Small()
        call, _ = compiled(module)
        torch.manual_seed(0)
        plain = Small()
        assert same(accumulate(call, module), accumulate(plain, plain))


class TwoLosses(nn.Module):
    """The first of two backward calls would free much one by one if it did not retain the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, self.head(x).mean()


class TestRetained:
    """Backward calls that retain the graph for another one."""

    def trained(self, backend: Backend, retained: Sequence[bool]) -> None:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        module = TwoLosses()
        call = torch.compile(module, backend=backend)
        for again in retained:
            module.zero_grad()
            first, second = call(torch.ones(1024, 64))
            loss = mean_square(first)
            del first
            if again:
                loss.backward(retain_graph=True)
                second.backward()
            else:
                (loss + second).backward()
            del loss, second

    @pytest.mark.parametrize(
        "policy", ["pooch", "swap-all", "recompute-all", "chen-sqrt", "search"]
    )
    def test_what_stays_is_inside_the_promise(self, policy: str) -> None:
        roomy = Backend(budget="1GiB", policy="pooch")
        self.trained(roomy, [True] * STEPS)
        statuses = roomy.engine.registry.statuses() if roomy.engine else []
        (planned,) = (each.planned for each in statuses)
        assert planned is not None
        assert planned.retaining_bytes is not None
        least, most = floor(planned.problem).nbytes, planned.in_core.peak(Tier.DEVICE)
        budget = (least + most) // 2 - (1 << 30) // MARGIN_DIVISOR
        backend = Backend(budget=budget, policy=policy)
        del roomy, planned, statuses
        self.trained(backend, [True] * (STEPS + 2))
        report = backend.report()
        assert (report.state, report.notes) == ("planned", ())
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes

    def test_where_it_comes_as_a_surprise_the_report_says_so(self) -> None:
        backend = Backend(budget="1GiB", policy="pooch")
        self.trained(backend, [False] * STEPS + [True])
        (note,) = backend.report().notes
        assert note.startswith("backward was called with retain_graph after the plan was made")


class TestUses:
    def test_eval_and_no_grad_between_steps(self) -> None:
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module)
        torch.manual_seed(0)
        plain = Small()
        for step in range(STEPS):
            torch.manual_seed(step)
            call(batch(0)).sum().backward()
            torch.manual_seed(step)
            plain(batch(0)).sum().backward()
            with torch.no_grad():
                assert torch.equal(call.eval()(batch(3)), plain.eval()(batch(3)))
            module.train()
            plain.train()
            assert same([snapshot(module, torch.zeros(()))], [snapshot(plain, torch.zeros(()))])
        assert outstanding(backend) == 0

    def test_frozen_parameters(self) -> None:
        def frozen() -> nn.Module:
            torch.manual_seed(0)
            module = Small()
            for p in (*module.first.parameters(), *module.norm.parameters()):
                p.requires_grad_(False)
            return module

        module, plain = frozen(), frozen()
        call, _ = compiled(module)
        seen = train(module, call, [batch(0)], mean_square, STEPS)
        assert same(seen, train(plain, plain, [batch(0)], mean_square, STEPS))

    def test_tied_weights_and_a_parameter_used_twice(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(50, 16)
                self.middle = nn.Linear(16, 16)
                self.out = nn.Linear(16, 50, bias=False)
                self.out.weight = self.table.weight

            def forward(self, tokens: Tensor) -> Tensor:
                h = self.table(tokens)
                for _ in range(3):
                    h = torch.nn.functional.dropout(torch.tanh(self.middle(h)), 0.1)
                logits: Tensor = self.out(h)
                return logits

        tokens = torch.randint(50, (8, 64), generator=torch.Generator().manual_seed(0))
        budget = tight_budget(Tied(), [tokens], mean_square)
        torch.manual_seed(0)
        module = Tied()
        call, backend = compiled(module, budget=budget, policy="pooch{min_bytes=1KiB}")
        seen = train(module, call, [tokens], mean_square, STEPS)
        torch.manual_seed(0)
        plain = Tied()
        assert same(seen, train(plain, plain, [tokens], mean_square, STEPS))
        counts = backend.report().counts
        assert counts.offload + counts.recompute > 0

    def test_autocast_bfloat16(self) -> None:
        def run(call: Any, module: nn.Module) -> list[list[Tensor]]:
            def autocast(x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    y: Tensor = call(x)
                return y.float()

            return train(module, autocast, [batch(0)], mean_square, STEPS)

        torch.manual_seed(0)
        module = Small()
        call, _ = compiled(module)
        seen = run(call, module)
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = Small()
        assert same(seen, run(torch.compile(plain, backend="aot_eager"), plain))

    @pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
    def test_autocast_around_backward_alone_changes_nothing(self, policy: str) -> None:
        """What runs again must not be cast, nor may kernels seem to make other dtypes."""

        def run(call: Any, module: nn.Module, *, autocast: bool) -> list[list[Tensor]]:
            seen = []
            for step in range(STEPS):
                torch.manual_seed(step)
                module.zero_grad()
                loss = mean_square(call(batch(0)))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss.backward()
                seen.append(away(snapshot(module, loss)))
            return list(map(back, seen))

        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module, policy=policy)
        seen = run(call, module, autocast=True)
        assert backend.report().state == "planned"
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = Small()
        traced = torch.compile(plain, backend="aot_eager")
        assert same(seen, run(traced, plain, autocast=False))

    @pytest.mark.parametrize("policy", ["swap-all", "recompute-all", "pooch"])
    def test_graph_breaks_share_one_budget(self, policy: str) -> None:
        torch.manual_seed(0)
        module = Broken()
        call, backend = compiled(module, policy=policy, budget=ROOM_FOR_ONE)
        seen = train(module, call, [batch(0)], mean_square, STEPS + 2)
        torch.manual_seed(0)
        plain = Broken()
        assert same(seen, train(plain, plain, [batch(0)], mean_square, STEPS + 2))
        report = backend.report()
        assert report.graphs == 2
        assert report.state == "planned"
        assert report.counts.offload + report.counts.recompute > 0
        assert report.measured_peak_bytes is not None
        assert report.in_core_peak_bytes is not None
        assert report.measured_peak_bytes <= report.budget_bytes < report.in_core_peak_bytes
        problem = replace(report.steps[0].problem, between_bytes=0)
        alone = peak(problem, lower(problem, KEEP_ALL), Tier.DEVICE)
        assert alone.nbytes <= report.budget_bytes, "the first would be kept, but for the second"

    def test_room_for_later_graphs_is_no_more_than_they_can_use(self) -> None:
        budget = 1 << 30
        module = Broken()
        call, backend = compiled(module, budget=budget)
        train(module, call, [batch(0)], mean_square, STEPS + 2)
        report = backend.report()
        assert report.graphs == 2
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        margin = budget // MARGIN_DIVISOR
        assert report.measured_peak_bytes <= report.predicted_peak_bytes
        assert report.predicted_peak_bytes <= 2 * report.measured_peak_bytes + margin

    def test_a_second_instance_of_the_same_class(self) -> None:
        torch.manual_seed(0)
        first, second = Small(), Small()
        call, backend = compiled(first)
        other = torch.compile(second, backend=backend)
        train(first, call, [batch(0)], mean_square, STEPS)
        seen = train(second, other, [batch(1)], mean_square, STEPS)
        torch.manual_seed(0)
        _, plain = Small(), Small()
        assert same(seen, train(plain, plain, [batch(1)], mean_square, STEPS))

    def test_a_copy_is_the_backend_itself(self) -> None:
        backend = Backend(budget="1GiB")
        assert copy.deepcopy({"backend": backend})["backend"] is backend

    def test_a_pickle_of_a_compiled_model_trains_under_the_same_budget(self) -> None:
        module = Small()
        call, _ = compiled(module, budget="2GiB", policy="swap-all")
        train(module, call, [batch(0)], mean_square, STEPS)
        file = io.BytesIO()
        torch.save(call, file)
        file.seek(0)
        torch._dynamo.reset()
        again: Any = torch.load(file, weights_only=False)
        found = train(again, again, [batch(0)], mean_square, STEPS)
        assert same(found, train(module, module, [batch(0)], mean_square, STEPS))
        compiler: Any = innermost_backend(again.dynamo_ctx.callback)
        assert compiler.compiler_fn.options.policy == "swap-all"
        assert compiler.compiler_fn.engaged

    def test_a_recompile_keeps_the_plan(self) -> None:
        module = Small()
        call, backend = compiled(module)
        train(module, call, [batch(0)], mean_square, STEPS)
        torch._dynamo.reset()
        again = torch.compile(module, backend=backend)
        again(batch(0)).sum().backward()
        assert backend.report().state == "planned"

    def test_a_graph_that_cannot_be_planned_says_so_once(self) -> None:
        class Host(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.nonzero(x > 0).sum() * x.sum()

        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Host(), backend=backend)
        x = torch.ones(3, requires_grad=True)
        with (
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
            pytest.warns(UserWarning, match="in-core"),
        ):
            call(x).backward()
        assert x.grad is not None
        assert backend.report().notes


class TestTrouble:
    def test_nan_is_plain_behavior(self) -> None:
        module = Small()
        call, _ = compiled(module)
        x = batch(0)
        x[0, 0, 0, 0] = float("nan")
        for _ in range(STEPS):
            loss = call(x).sum()
            loss.backward()
            assert loss.isnan()

    def test_an_exception_in_the_model_leaves_it_usable(self) -> None:
        class Moody(Small):
            fail = False

            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                torch._dynamo.graph_break()
                if self.fail:
                    raise ArithmeticError("a bad mood")
                return y * 2

        torch.manual_seed(0)
        module = Moody()
        call, backend = compiled(module)
        for step in range(STEPS):
            module.fail = step == STEPS - 1
            if module.fail:
                with pytest.raises(ArithmeticError):
                    call(batch(0))
            else:
                call(batch(0)).sum().backward()
        module.fail = False
        module.zero_grad()
        call(batch(0)).sum().backward()
        assert outstanding(backend) == 0

    def test_an_input_changed_before_a_rerun_is_refused(self) -> None:
        module = Small()
        call, _ = compiled(module, policy="recompute-all")
        for _ in range(STEPS):
            call(batch(0)).sum().backward()
        loss = call(batch(0)).sum()
        with torch.no_grad():
            next(module.middle[0].parameters()).add_(1)
        with pytest.raises(RuntimeError, match=r"in-?place|in place"):
            loss.backward()

    def test_saved_tensor_hooks_of_the_user(self) -> None:
        torch.manual_seed(0)
        module = Small()
        call, backend = compiled(module)
        torch.manual_seed(0)
        plain = Small()
        for step in range(STEPS):
            torch.manual_seed(step)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                loss = call(batch(0)).sum()
            loss.backward()
            torch.manual_seed(step)
            expected = plain(batch(0)).sum()
            expected.backward()
            assert same([snapshot(module, loss)], [snapshot(plain, expected)])
        assert outstanding(backend) == 0

    def test_hooks_that_round_numbers_find_the_right_call(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As hooks do that save everything in 16 bits. Some calls never come back."""
        monkeypatch.setattr(store, "_numbers", count(250))
        torch.manual_seed(0)
        module = Small()
        call, _ = compiled(module)
        torch.manual_seed(0)
        plain = Small()
        hooks = partial(torch.autograd.graph.saved_tensors_hooks, integers_in_16_bits, unpacked)
        for step in range(2 * STEPS):
            torch.manual_seed(step)
            with hooks():
                call(batch(1)).sum()
                torch.manual_seed(step)
                loss = call(batch(0)).sum()
            loss.backward()
            torch.manual_seed(step)
            plain(batch(1)).sum()
            torch.manual_seed(step)
            expected = plain(batch(0)).sum()
            expected.backward()
            assert same([snapshot(module, loss)], [snapshot(plain, expected)])

    def test_a_hook_that_loses_numbers_is_refused(self) -> None:
        call, _ = compiled(Small())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, torch.zeros):
            loss = call(batch(0)).sum()
        with pytest.raises(StepError, match="a saved-tensor hook changed a tensor"):
            loss.backward()

    def test_a_hook_on_one_saved_tensor_that_replaces_it_is_told(self) -> None:
        """The call's data dies with what the hook replaced."""
        call, _ = compiled(Small())
        result = call(batch(0))
        for saved in result.grad_fn._raw_saved_tensors:
            saved.register_hooks(torch.clone, torch.clone)
        with pytest.raises(StepError, match="or a hook on a saved tensor replaced it"):
            result.sum().backward()


def integers_in_16_bits(saved: torch.Tensor) -> tuple[torch.dtype, torch.Tensor]:
    exact = saved.is_floating_point()
    return saved.dtype, saved.clone() if exact else saved.to(torch.bfloat16)


def unpacked(packed: tuple[torch.dtype, torch.Tensor]) -> torch.Tensor:
    dtype, saved = packed
    return saved.to(dtype)


class TestClosed:
    def test_the_memory_of_the_process_is_bounded_no_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, backend = small_planned(STEPS, budget=TIGHT, policy="swap-all")
        assert backend.engine is not None
        bounds: list[int | None] = []
        driver = backend.engine.driver
        monkeypatch.setattr(driver, "bound_memory", lambda _, most: bounds.append(most))
        backend.engine.plans.bound_memory()
        assert bounds[-1] is not None
        backend.close()
        assert bounds[-1] is None

    def test_steps_after_it_are_neither_metered_nor_timed(self) -> None:
        """The graph had a plan, and no longer follows it."""
        call, backend = compiled(Wide())
        train_on = partial(call, torch.ones(256, 64))
        for _ in range(STEPS):
            train_on().sum().backward()
        engine, before = backend.engine, backend.report()
        assert engine is not None
        backend.close()
        engine.metering.forget_peak()
        for _ in range(3):
            train_on().sum().backward()
            assert engine.metering.running is None
        after = backend.report()
        assert after.measured_peak_bytes is None
        assert after.measured_seconds == before.measured_seconds
        assert after.notes == (*before.notes, "its backend was closed")


class Wide(nn.Module):
    """A chain that saves a tensor of the same size per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)))
        return x


@torch.library.custom_op("test_backend::squashed", mutates_args=())
def squashed(x: Tensor) -> Tensor:
    """An op that outcore knows nothing about, so it is never recomputed."""
    return torch.tanh(x)


@squashed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


squashed.register_autograd(
    lambda ctx, gradient: gradient * (1 - ctx.saved_tensors[0] ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Once(Wide):
    """`Wide`, but of ops that are never recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = squashed(layer(x))
        return x


class Unfolded(nn.Module):
    """Each convolution has a workspace of 25 times its input, which is 256 KiB."""

    def __init__(self) -> None:
        super().__init__()
        given: Any = {"padding": 2, "dtype": torch.float64}
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 5, **given) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class TestRefused:
    """A graph that runs in-core needs no more memory than under aot_eager."""

    def peak_bytes(self, backend: Any) -> int:
        torch._dynamo.reset()
        module = Wide()
        call = torch.compile(module, backend=backend)
        for _ in range(2):
            module.zero_grad()
            call(torch.rand(512, 64)).sum().backward()
            if isinstance(backend, Backend) and backend.engine is not None:
                backend.engine.metering.end()
                graph = backend.engine.graphs[0]
                graph.give_up(CaptureError(reason="a test"))
        module.zero_grad()
        gc.collect()
        _, reading = metered(lambda: call(torch.rand(512, 64)).sum().backward())
        return reading.peak_bytes()

    def test_a_graph_that_cannot_be_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: Any) -> None:
            raise CaptureError(reason="a test")

        monkeypatch.setattr("outcore.capture.source.capture", refused)
        backend = Backend(budget="1GiB")
        with pytest.warns(UserWarning, match="a test"):
            mine = self.peak_bytes(backend)
        assert backend.engine is None
        assert mine <= self.peak_bytes("aot_eager")

    def test_a_graph_that_is_given_up(self) -> None:
        with pytest.warns(UserWarning, match="a test"):
            mine = self.peak_bytes(Backend(budget="1GiB"))
        assert mine <= self.peak_bytes("aot_eager")


class Constant(nn.Module):
    """A graph with a constant tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) * torch.tensor([2.0] * 8))


def generated_texts() -> set[str]:
    """Names of the generated programs, whose text tracebacks can quote."""
    return {name for name in linecache.cache if name.startswith("<outcore program")}


class TestDropped:
    """A graph lives as long as the code that torch compiled from it."""

    def watched(self, backend: Backend) -> tuple[Any, Any]:
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        (constant,) = graph.captured.constants
        return weakref.ref(graph), weakref.ref(constant)

    @pytest.mark.parametrize("steps", [1, 2, STEPS])
    def test_a_reset_drops_the_graph_and_its_tensors(self, steps: int) -> None:
        others = generated_texts()
        module = Constant()
        call, backend = compiled(module)
        for _ in range(steps):
            call(torch.ones(2, 8)).sum().backward()
        graph, constant = self.watched(backend)
        assert graph() is not None
        assert generated_texts() - others
        torch._dynamo.reset()
        gc.collect()
        assert graph() is None
        assert generated_texts() <= others
        assert constant() is None
        assert not torch.autograd.profiler._is_profiler_enabled
        assert backend.report().graphs == 1
        assert backend.parameters.ids
        del module, call
        gc.collect()
        assert not backend.parameters.ids, "an id may be another's by now"

    def test_metered_steps_do_not_outlive_their_steps(self) -> None:
        def alive() -> int:
            gc.collect()
            return sum(type(each) is MeteredStep for each in gc.get_objects())

        before = alive()
        call, backend = compiled(Wide())
        for _ in range(STEPS):
            call(torch.ones(256, 64)).sum().backward()
        assert backend.report().measured_peak_bytes is not None
        assert alive() <= before

    def test_graphs_do_not_pile_up(self) -> None:
        module = Constant()
        call, backend = compiled(module)
        assert call is not None
        for _ in range(4):
            torch._dynamo.reset()
            gc.collect()
            call(torch.ones(2, 8)).sum().backward()
        assert backend.engine is not None
        assert len(backend.engine.graphs) == backend.report().graphs == 1

    def test_a_twin_takes_over_the_plan_of_a_live_graph(self) -> None:
        first, second = Small(), Small()
        call, backend = compiled(first)
        train(first, call, [batch(0)], mean_square, STEPS)
        other = torch.compile(second, backend=backend)
        other(batch(0)).sum().backward()
        assert backend.engine is not None
        old, *new = backend.engine.graphs
        assert [g.planned for g in new] == [old.planned] * len(new)
        assert old.planned is not None

    def test_a_plan_is_not_taken_over_where_more_is_held_by_now(self) -> None:
        module, x = Small(), batch(0)
        budget = tight_budget(module, [x], mean_square, 0.9)
        call, backend = compiled(module, budget=budget)
        train(module, call, [x], mean_square, STEPS)
        assert backend.report().state == "planned"
        torch._dynamo.reset()
        mean_square(call(x)).backward()
        assert backend.report().state == "planned"
        torch._dynamo.reset()
        more = torch.ones(budget // 16, dtype=torch.uint8)
        mean_square(call(x)).backward()
        assert backend.report().state == "profiling"
        del more


class Halves(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wide(), Wide()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        torch._dynamo.graph_break()
        return y, self.second(x)


class Block(nn.Linear):
    """A graph that differs from the one of `Wide`."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class TestSeveralGraphs:
    """Several graphs, some of them called more often than others."""

    def train(self, backend: Backend, step: Any) -> None:
        for _ in range(PROFILED_STEPS + 2):
            step(torch.ones(256, 64))
        report = backend.report()
        assert report.graphs == len(report.steps) == 2
        assert report.measured_peak_bytes is not None

    def test_one_is_called_once_a_step_and_the_other_many_times(self) -> None:
        call, backend = compiled(Wide(), budget="1GiB")
        other = torch.compile(Block(), backend=backend)

        def step(x: Tensor) -> None:
            y = call(x)
            for _ in range(3 * IDLE_STEPS):
                y = other(y)
            y.sum().backward()

        self.train(backend, step)

    def test_one_has_a_step_of_its_own_after_many_of_the_other(self) -> None:
        call, backend = compiled(Wide(), budget="1GiB")
        other = torch.compile(Block(), backend=backend)

        def step(x: Tensor) -> None:
            call(x).sum().backward()
            for _ in range(3 * IDLE_STEPS):
                other(x).sum().backward()

        self.train(backend, step)

    def test_a_graph_that_waits_for_its_backward_is_one_that_runs(self) -> None:
        module, inner = Small(), Wide()
        call, backend = compiled(module)
        other = torch.compile(inner, backend=backend)
        seen = []
        for _ in range(STEPS):
            loss = mean_square(call(batch(0)))
            for _ in range(3 * IDLE_STEPS):
                other(torch.ones(2, 64)).sum().backward()
            assert backend.engine is not None
            seen.append(len(backend.engine.registry.active()))
            loss.backward()
        assert seen == [2] * STEPS

    def test_one_that_a_recompile_replaced_is_left_out_though_many_run(self) -> None:
        module = Halves()
        call, backend = compiled(module, budget="1GiB")
        for rows in (256, 128):
            for _ in range(PROFILED_STEPS + 1):
                with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                    sum(y.sum() for y in call(torch.ones(rows, 64))).backward()
        assert backend.engine is not None
        assert len(backend.engine.graphs) == 4
        assert backend.report().graphs == 2

    def test_shapes_that_take_turns_share_one_disk_budget(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="3MiB", policy="swap-all", disk_budget="5MiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        for _ in range(PROFILED_STEPS + 1):
            for rows in (1024, 992, 960):
                call(torch.ones(rows, 64)).sum().backward()
        assert backend.engine is not None
        rooms = [
            s.planned.problem.disk_budget_bytes
            for s in backend.engine.registry.statuses()
            if s.planned
        ]
        assert rooms == [5 * 2**20] * 3
        report = backend.report()
        assert report.graphs == 3, "each is as usual as the others"
        assert not any("few of the latest steps" in note for note in report.notes)

    def test_figures_of_shapes_that_take_turns_are_those_of_a_step(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        wide, narrow = torch.ones(1024, 64), torch.ones(512, 64)
        for rows in [*[wide] * PROFILED_STEPS, *[narrow] * PROFILED_STEPS]:
            call(rows).sum().backward()
        for rows in [wide, narrow, wide] * 30:
            call(rows).sum().backward()
        assert backend.engine is not None
        statuses = backend.engine.registry.statuses()
        report, clock = backend.report(), backend.engine.driver.clock
        shares = [step.share for step in report.steps]
        assert shares == pytest.approx([2 / 3, 1 / 3], abs=0.02)
        planned = [s.planned for s in statuses if s.planned]
        mean = sum(s * p.predicted.seconds for s, p in zip(shares, planned, strict=True))
        assert report.predicted_seconds == pytest.approx(mean)
        took = [s.times.seconds(clock) or 0.0 for s in statuses]
        assert report.measured_seconds == pytest.approx(
            sum(s * t for s, t in zip(shares, took, strict=True))
        )
        assert "graphs take turns" in report.notes[0]
        bounded = backend.report(bound=True).lower_bound_seconds
        assert bounded is not None
        assert bounded <= mean * (1 + 1e-6)

    def test_a_step_is_not_measured_before_all_of_it_ran_as_planned(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        for rows in (1024, 512):
            for _ in range(PROFILED_STEPS + 1):
                call(torch.ones(rows, 64)).sum().backward()
        assert backend.report().measured_seconds is not None
        assert backend.engine is not None
        *_, last = backend.engine.registry.statuses()
        last.times.recent.clear()
        assert backend.report().measured_seconds is None

    def test_a_last_batch_of_another_size_is_no_part_of_a_step(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        full, last = torch.ones(256, 64), torch.ones(320, 64)  # larger, so that it sets the peaks
        for _ in range(PROFILED_STEPS + 1):
            for rows in (*[full] * 31, last):
                call(rows).sum().backward()
        assert backend.engine is not None
        usual, other = (s.planned for s in backend.engine.registry.statuses())
        assert usual is not None
        assert other is not None
        report = backend.report()
        assert (report.graphs, report.others, len(report.steps)) == (1, 1, 1)
        assert report.several_graphs, "the measured peak may be of the other"
        assert report.predicted_seconds == usual.predicted.seconds
        assert report.predicted_peak_bytes == other.predicted.peak(Tier.DEVICE)
        assert report.predicted_peak_bytes > usual.predicted.peak(Tier.DEVICE)
        assert "1 graph runs in few of the latest steps" in report.notes[0]

    def test_a_call_that_never_goes_back_is_no_step_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(steps, "LONGEST_STEP", 3)
        call, backend = compiled(Wide(), budget="1GiB")
        kept = call(torch.ones(256, 64))
        assert backend.engine is not None
        before = backend.engine.steps.number
        for _ in range(9):
            call(torch.ones(256, 64)).sum().backward()
        assert backend.engine.steps.number - before == 3
        (status,) = backend.engine.registry.statuses()
        assert status.history.calls(backend.engine.steps.number) == 1, "none of these was one"
        assert kept.requires_grad

    def test_backward_that_always_retains_is_counted(self) -> None:
        call, backend = compiled(Wide(), budget="1GiB")
        for _ in range(PROFILED_STEPS + 2):
            loss = call(torch.ones(256, 64)).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            del loss
        assert backend.engine is not None
        (status,) = backend.engine.registry.statuses()
        assert [calls for _, calls in status.history.latest_steps] == [1] * (PROFILED_STEPS + 2)


class TestMeter:
    def metering(self) -> bool:
        return bool(_profiler_enabled())

    def test_reading_in_the_middle_of_a_step_changes_nothing(self) -> None:
        def peak_bytes(*, reads: bool) -> int:
            call, backend = compiled(Halves(), budget="1GiB")
            for _ in range(STEPS):
                for output in call(torch.ones(256, 64)):
                    if reads:
                        backend.report()
                    output.sum().backward()
                    if reads:
                        backend.report()
                del output
            peak = backend.report().measured_peak_bytes
            assert peak is not None
            del call
            gc.collect()
            return peak

        quiet = peak_bytes(reads=False)
        assert peak_bytes(reads=True) == quiet

    def test_reading_after_a_step_knows_its_peak(self) -> None:
        call, backend = compiled(Wide(), budget="1GiB")
        for _ in range(PROFILED_STEPS):
            assert backend.report().measured_peak_bytes is None
            call(torch.ones(256, 64)).sum().backward()
        assert backend.report().measured_peak_bytes is not None
        assert not self.metering()

    def test_the_peak_is_that_of_the_largest_of_several_shapes(self) -> None:
        def peak_bytes(*shapes: int) -> int:
            torch._dynamo.reset()
            gc.collect()
            backend = Backend(budget="1GiB")
            call = torch.compile(Wide(), backend=backend, dynamic=False)
            for _ in range(PROFILED_STEPS + 3):
                for rows in shapes:
                    call(torch.ones(rows, 64)).sum().backward()
            report = backend.report()
            assert report.measured_peak_bytes is not None
            assert report.predicted_peak_bytes is not None
            assert report.measured_peak_bytes <= report.predicted_peak_bytes
            return report.measured_peak_bytes

        small, large = peak_bytes(256), peak_bytes(2048)
        assert small < large
        for shapes in ((256, 2048), (2048, 256), (256, 2048, 512)):
            assert peak_bytes(*shapes) >= large

    def test_a_metered_step_of_one_of_several_shapes_ends_before_an_evaluation(self) -> None:
        torch._dynamo.reset()
        module = Wide()
        backend = Backend(budget="1GiB")
        call = torch.compile(module, backend=backend, dynamic=False)
        for rows in (256, 128) * (PROFILED_STEPS + 2):
            call(torch.ones(rows, 64)).sum().backward()
        assert backend.engine is not None
        large, small = (s.peaks.step_bytes or 0 for s in backend.engine.registry.statuses())
        assert large > small > 0
        backend.engine.metering.forget_peak()
        call(torch.ones(256, 64)).sum().backward()
        assert backend.engine.metering.running is not None
        backend.engine.close_step()
        assert backend.engine.metering.running is None
        assert backend.engine.metering.peak_bytes is not None

    @pytest.mark.parametrize("every", [False, True])
    def test_a_report_before_the_optimizer_s_step_hides_nothing_of_it(self, *, every: bool) -> None:
        """`foreach` makes temporary tensors as large as the weights.

        One input serves all steps: torch's profiler does not always see the free of a tensor that
        is older than the metered step.
        """
        inputs = torch.ones(8, 256)

        def trained(reports: range) -> GraphStatus:
            torch._dynamo.reset()
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
            optimizer = torch.optim.Adam(module.parameters(), foreach=True)
            backend = Backend(budget="1GiB")
            call = torch.compile(module, backend=backend)
            for step in range(PROFILED_STEPS + 6):
                call(inputs).sum().backward()
                if step in reports:
                    backend.report()
                optimizer.step()
                optimizer.zero_grad()
            assert backend.engine is not None
            (status,) = backend.engine.registry.statuses()
            backend.close()
            return status

        plain = trained(range(0))
        found = trained(range(99) if every else range(PROFILED_STEPS + 1, PROFILED_STEPS + 2))
        assert plain.peaks.after_bytes is not None
        assert found.peaks.after_bytes is not None
        assert found.peaks.after_is_whole != every
        assert every or found.peaks.after_bytes == plain.peaks.after_bytes
        assert found.after_beyond_bytes == plain.after_beyond_bytes > 0
        assert found.peaks.step_bytes == plain.peaks.step_bytes

    def test_a_shape_that_did_not_run_yet_counts_for_nothing(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        for rows in (256, 128) * (PROFILED_STEPS + 1):
            call(torch.ones(rows, 64)).sum().backward()
        assert backend.engine is not None
        first, second = backend.engine.registry.statuses()
        second.history.latest_steps.clear()
        assert first.planned is not None
        report = backend.report()
        assert report.predicted_seconds == first.planned.predicted.seconds
        assert not any("take turns" in note for note in report.notes)

    def test_the_peak_is_known_before_a_rare_shape_is_planned(self) -> None:
        torch._dynamo.reset()
        backend = Backend(budget="1GiB")
        call = torch.compile(Wide(), backend=backend, dynamic=False)
        for _ in range(2):
            for rows in (*[256] * 12, 384):
                call(torch.ones(rows, 64)).sum().backward()
        report = backend.report()
        assert report.state == "profiling", "the larger batch came but twice"
        assert report.measured_peak_bytes is not None

    def test_a_graph_that_is_never_planned(self) -> None:
        """As when a trainer converts results to float32 that are never differentiated."""
        module, idle = Wide(), Constant()
        call, backend = compiled(module, budget="1GiB")
        other = torch.compile(idle, backend=backend)
        for _ in range(2 * PROFILED_STEPS + MOST_STEPS_WITHOUT_BACKWARD + MOST_PEAK_TRIES):
            call(torch.ones(256, 64)).sum().backward()
            other(torch.ones(2, 8))
        assert not self.metering()
        assert backend.engine is not None
        assert backend.engine.metering.running is None
        report = backend.report()
        assert report.state == "in-core"
        assert report.measured_peak_bytes is not None
        for _ in range(2 * PROFILED_STEPS):
            call(torch.ones(256, 64)).sum().backward()
            other(torch.ones(2, 8)).sum().backward()
        assert backend.report().measured_peak_bytes is not None
        assert not self.metering()

    def test_a_recording_that_is_cut_short(self) -> None:
        call, backend = compiled(Wide(), budget="1GiB")
        for _ in range(PROFILED_STEPS + 1):
            call(torch.ones(256, 64)).sum().backward()
        assert backend.engine is not None
        driver: Any = backend.engine.driver
        backend.record_step()
        y = call(torch.ones(256, 64))
        assert driver.on_copy is not None
        backend.close()
        assert driver.on_copy is None
        y.sum().backward()

    def test_a_recording_whose_backward_never_comes(self) -> None:
        """It ends, the other graph gets its timeline, and the graph records a later step."""
        call, backend = compiled(Wide(), budget="1GiB")
        other = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), backend=backend)
        x = torch.ones(256, 64)
        for _ in range(2 * PROFILED_STEPS + 1):
            call(x).sum().backward()
            other(x).sum().backward()
        assert backend.engine is not None
        driver: Any = backend.engine.driver

        def recorded() -> list[bool]:
            assert backend.engine is not None
            return [graph.status.measured is not None for graph in backend.engine.graphs]

        backend.record_step()
        late = other(x).sum()
        del late
        call(x).sum().backward()
        assert recorded() == [False, False]
        for _ in range(LONGEST_RECORDING + 1):
            call(x).sum().backward()
        assert driver.on_copy is None
        assert recorded() == [True, False]
        other(x).sum().backward()
        assert recorded() == [True, True]

    def evaluated(
        self, module: nn.Module, budget: str, x: Tensor | None = None
    ) -> tuple[Any, Backend, int]:
        """Evaluate `module` with gradients enabled; the bytes are those that a last call writes."""
        x = torch.ones(1024, 64) if x is None else x
        call, backend = compiled(module, budget=budget)
        for _ in range(MOST_STEPS_WITHOUT_BACKWARD + 1):
            call(x)
        assert backend.engine is not None
        written = backend.engine.driver.disk_bytes_written
        before = written()
        _, reading = metered(lambda: call(x))
        assert reading.peak_bytes() <= backend.engine.settings.budget_bytes
        return call, backend, written() - before

    def planned_after_all(self, call: Any, backend: Backend) -> bool:
        for _ in range(PROFILED_STEPS + 1):
            call(torch.ones(1024, 64)).sum().backward()
        assert backend.engine is not None
        return backend.engine.graphs[0].planned is not None

    def test_evaluation_with_gradients_moves_nothing_where_there_is_room(self) -> None:
        call, backend, written = self.evaluated(Wide(), "1GiB")
        assert not written
        assert self.planned_after_all(call, backend)

    def test_evaluation_with_gradients_moves_nothing_that_could_be_made_again(self) -> None:
        call, backend, written = self.evaluated(Wide(), "2400KiB")
        assert not written
        assert self.planned_after_all(call, backend)

    def test_evaluation_with_gradients_keeps_to_the_budget(self) -> None:
        call, backend, written = self.evaluated(Once(), "2400KiB")
        assert written > 0
        assert self.planned_after_all(call, backend)

    def test_evaluation_with_gradients_may_end_on_another_thread(self) -> None:
        call, backend, _ = self.evaluated(Wide(), "1GiB")
        loss = call(torch.ones(1024, 64)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert backend.report().state == "profiling"
        assert self.planned_after_all(call, backend)

    def test_evaluation_with_gradients_is_checked_until_a_backward_was(self) -> None:
        """Checked calls hold their inputs, and copies of those that are overwritten."""
        call, backend, _ = self.evaluated(Wide(), "1GiB")
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        for confirmed in (False, True):
            assert graph.confirmed == confirmed
            assert graph.profiling is not None
            assert graph.profiling.keeping is not None
            assert graph.profiling.keeping.checked != confirmed
            call(torch.ones(1024, 64)).sum().backward()
            for _ in range(2 * MOST_STEPS_WITHOUT_BACKWARD + 1):
                call(torch.ones(1024, 64))

    def test_workspaces_are_those_of_the_program_that_was_metered(self) -> None:
        """Not those of times before: a checked step under a profiler, then calls that keep all."""

        def workspaces(before: Callable[[Any, Tensor], None]) -> tuple[int, ...]:
            torch._dynamo.reset()
            module, leader = Unfolded(), Wide()
            backend = Backend(budget="1GiB")
            call, other = (torch.compile(each, backend=backend) for each in (module, leader))
            x = torch.ones(8, 4, 32, 32, dtype=torch.float64)
            before(call, x)
            for _ in range(2 * PROFILED_STEPS):
                (other(torch.ones(256, 64)).sum() + call(x).sum()).backward()
            assert backend.engine is not None
            planned = next(g.planned for g in backend.engine.graphs if "conv" in str(g.ops))
            assert planned is not None
            return planned.problem.profile.workspace_bytes

        def unmetered(call: Any, x: Tensor) -> None:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
                call(x).sum().backward()
            for _ in range(MOST_STEPS_WITHOUT_BACKWARD + 2):
                call(x)

        assert workspaces(unmetered) == workspaces(lambda *_: None)

    def test_evaluation_with_gradients_leaves_room_for_workspaces(self) -> None:
        """They are 6.25 MiB, and not known: as much as profiled steps leave is left to them."""
        images = torch.ones(8, 4, 32, 32, dtype=torch.float64)
        _, _, written = self.evaluated(Unfolded(), "7MiB", images)
        assert not written

    def test_a_graph_that_comes_late_does_not_keep_others_from_being_timed(self) -> None:
        """Others are timed while it is metered, and in metered steps whose peak is not final."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Small()
        backend = Backend(budget="1GiB")
        call = torch.compile(module, backend=backend, dynamic=False)
        sizes = [4, 4, 4, 2, *[4] * PROFILED_STEPS]
        for size in sizes:
            mean_square(call(batch(0, size))).backward()
        assert backend.engine is not None
        assert [g.status.state.value for g in backend.engine.graphs] == ["in-core", "profiling"]

    def test_several_graphs_that_nobody_differentiates_are_found_out_together(self) -> None:
        """Like an encoder before a quantizer, with each layer a separate graph."""
        torch._dynamo.reset()
        layers = [nn.Linear(64, 64 + i) for i in range(6)]
        call, backend = compiled(Wide(), budget="1GiB")
        idle = [torch.compile(layer, backend=backend) for layer in layers]
        for _ in range(PROFILED_STEPS + MOST_STEPS_WITHOUT_BACKWARD):
            for each in idle:
                each(torch.ones(8, 64))
            call(torch.ones(256, 64)).sum().backward()
        report = backend.report()
        assert report.state == "in-core"
        assert report.measured_peak_bytes is not None

    def test_forwards_alone(self) -> None:
        call, _ = compiled(Wide(), budget="1GiB")
        for _ in range(MOST_STEPS_WITHOUT_BACKWARD + 1):
            call(torch.ones(256, 64))
        assert not self.metering()

    def test_a_leader_that_never_comes_back(self) -> None:
        first, second = Wide(), Wide()
        call, backend = compiled(first, budget="1GiB")
        call(torch.ones(256, 64)).sum().backward()
        assert self.metering()
        other = torch.compile(second, backend=backend)
        for _ in range(2 * PROFILED_STEPS):
            other(torch.ones(256, 64)).sum().backward()
        assert not self.metering()
        assert backend.report().measured_peak_bytes is not None
