"""Unusual ops: without results, or with results that fake tensors describe wrongly."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._higher_order_ops.effects import has_effects
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from outcore import Backend
from outcore.capture.compiler.tracing import as_kernels
from outcore.errors import StepError
from outcore.report import Report
from outcore.runtime.budget.plans import Plans
from outcore.runtime.graphs.status import MOST_STEPS_WITHOUT_BACKWARD, Returns
from tests.cpu.training import PROFILED_STEPS, mean_square, same, tight_budget, train

STEPS = PROFILED_STEPS + 3
ROWS = 4096
NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


def hidden() -> nn.Sequential:
    layers = (layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers)


class Chosen(nn.Module):
    """`one_hot` checks its argument with an op that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = hidden()

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        chosen: Tensor = self.hidden(x) * F.one_hot(classes, 32)
        return chosen


class Bagged(nn.Module):
    """An embedding bag's kernel returns tensors of other sizes than its fake kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 32, mode="mean")
        self.hidden = hidden()

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.hidden(self.bag(indices, offsets))
        return result


class Folded(nn.Module):
    """The result of `fold` is a view of more memory than its fake one; views of it follow."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = hidden(), hidden()

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).view(1, 1, ROWS, 32)
        patches = F.unfold(y, 3, padding=1)
        folded = F.fold(patches, (ROWS, 32), 3, padding=1).view(ROWS, 32)
        result: Tensor = self.behind(folded / 9)
        return result


def trained(
    kind: type[nn.Module], args: Sequence[Tensor], budget: int | None
) -> tuple[list[list[Tensor]], Report | None]:
    """Train under `budget`, or by `aot_eager` if that is None."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    module = kind()
    backend = None if budget is None else Backend(budget=budget)
    call = torch.compile(module, backend="aot_eager" if backend is None else backend)
    seen = train(module, call, args, mean_square, STEPS)
    return seen, None if backend is None else backend.report()


def check(kind: type[nn.Module], args: Sequence[Tensor]) -> None:
    budget = tight_budget(kind(), args, mean_square, 0.5)
    seen, report = trained(kind, args, budget)
    assert report is not None
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    assert same(seen, trained(kind, args, None)[0])


def test_an_op_without_results() -> None:
    check(Chosen, [torch.randn(ROWS, 32), torch.randint(32, (ROWS,))])


class Recurring(nn.Module):
    """Cells split their gates by ops whose results are views, though no schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(32, 32), nn.GRUCell(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        state, kept = (x[0], x[0]), x[0]
        for rows in x:
            state = self.first(rows, state)
            kept = self.second(state[0], kept)
        return kept


def test_cells_of_recurrent_layers() -> None:
    check(Recurring, [torch.randn(8, ROWS // 8, 32)])


def test_views_of_what_is_not_as_described() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Folded, [torch.randn(ROWS, 32)])


def test_after_a_correction_the_peak_is_inside_the_promise() -> None:
    check(Bagged, [torch.randint(50, (ROWS,)), torch.arange(0, ROWS, 8)])


class Dropped(nn.Module):
    """torch describes a dropout's gradient as laid out like its mask; kernels do not do so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32), nn.Conv1d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.layer(x), 0.1)
        result: Tensor = self.last(torch.tanh(hidden).transpose(1, 2))
        return result


class Normalized(nn.Module):
    """The same for a batch norm between two transpositions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.layer(x)).transpose(1, 2))
        result: Tensor = self.last(hidden.transpose(1, 2))
        return result


@pytest.mark.parametrize("kind", [Dropped, Normalized])
def test_a_view_that_does_not_fit_what_is_really_there(kind: type[nn.Module]) -> None:
    """With `aot_eager`, which keeps the view, the first backward call raises an error."""
    images = [torch.randn(ROWS // 8, 64, 32)]

    def steps(call: Callable[[nn.Module], Any]) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = kind()
        return train(module, call(module), images, mean_square, STEPS)

    # The graph is corrected first.
    budget = int(1.06 * tight_budget(kind(), images, mean_square, 0.8))
    backend = Backend(budget=budget, strict=True)
    found = steps(lambda module: torch.compile(module, backend=backend))
    assert same(found, steps(lambda module: module))
    report = backend.report()
    assert report.measured_peak_bytes
    assert report.predicted_peak_bytes
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


class Jittered(torch.autograd.Function):
    """Its backward draws."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient * torch.rand_like(gradient)


class DroppedBetween(Dropped):
    """Draws in backward both before and after the op that is not as described."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(Jittered.apply(self.layer(x)), 0.1)
        result: Tensor = Jittered.apply(self.last(torch.tanh(hidden).transpose(1, 2)))
        return result


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
def test_a_backward_that_begins_anew_draws_the_same() -> None:
    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = DroppedBetween()
        call = module if backend is None else torch.compile(module, backend=backend)
        seen = train(module, call, [torch.ones(4, 8, 32)], loss_of, 1)
        return [*seen, [torch.get_rng_state()]]

    def loss_of(y: Tensor) -> Tensor:
        return mean_square(F.dropout(y, 0.5))

    assert same(trained(Backend(budget="1GiB", strict=True)), trained(None))


def test_such_a_view_is_a_copy_in_core_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Normalized(), torch.randn(ROWS // 8, 64, 32)
    backend = Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        module.zero_grad()
        mean_square(call(x)).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    gradients(call)
    backend.close()
    assert same([gradients(call)], [gradients(module)])


class Restored(nn.Module):
    """A batch norm whose result is made channels last; its gradient has another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        return self.norm(hidden).contiguous(memory_format=torch.channels_last), hidden.mean()


def test_backward_twice_through_what_is_not_as_described() -> None:
    def trained_twice(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, seen = Restored(), []
        call = torch.compile(module, backend=backend)
        for step in range(STEPS):
            torch.manual_seed(step)
            module.zero_grad()
            first, second = call(torch.randn(4, 8, 16, 16))
            second.backward(retain_graph=True)
            first.square().mean().mul(3).backward()
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return seen

    backend = Backend(budget="1GiB", strict=True)
    assert same([trained_twice(backend)], [trained_twice("aot_eager")])
    assert backend.report().state == "in-core"


def corrections(module: nn.Module, x: Tensor) -> list[int]:
    """How often each graph of `module` was captured again; its steps equal `aot_eager`'s."""
    plain = copy.deepcopy(module)
    torch._dynamo.reset()
    backend = Backend(budget="1GiB", strict=True)
    seen = train(module, torch.compile(module, backend=backend), [x], norm_of, STEPS)
    traced = torch.compile(plain, backend="aot_eager")
    assert same(seen, train(plain, traced, [x], norm_of, STEPS))
    assert backend.engine is not None
    assert backend.engine.steps.number == STEPS, "a call that began anew is one"
    return [graph.corrections for graph in backend.engine.graphs]


def test_ops_alike_are_corrected_together() -> None:
    """Batch norms in bfloat16 save two statistics each in float32."""
    layers = (layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    module = nn.Sequential(*layers).to(torch.bfloat16)
    assert corrections(module, torch.randn(2, 4, 20, 20, dtype=torch.bfloat16)) == [1]


class Narrow(nn.Module):
    """Heads of one channel: in matrix products, the stride of a side of 1 selects the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(1, len(x), 16, 1).permute(0, 2, 1, 3)
            for part in self.before(x).split(16, 1)
        )
        weights = torch.einsum("bhxd,bhyd->bhxy", q, k).softmax(-1)
        mixed = torch.einsum("bhxy,bhyd->bhxd", weights, v)
        result: Tensor = self.behind(mixed.permute(0, 2, 1, 3).reshape(len(x), 16))
        return result


class Single(nn.Module):
    """One head: the stride of its side, of 1, is taken from one factor or from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.turn = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 1, 64, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).view(1, len(x), 1, 16).transpose(1, 2) * self.turn
        result: Tensor = y @ y.transpose(2, 3)
        return result


def test_sides_of_one_have_the_strides_of_plain_torch() -> None:
    assert corrections(Narrow(), torch.randn(64, 16)) == [0]


def test_results_whose_sides_of_one_are_not_as_described() -> None:
    assert corrections(Single(), torch.randn(64, 16)) == [1]


class Squeezed(nn.Module):
    """Squeeze and excitation: kernels do not lay out its maps of one pixel channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(width, width + 4, 3, padding=1)
        self.down, self.up = nn.Conv2d(width + 4, 4, 1), nn.Conv2d(4, width + 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.layer(x))
        pixel = x.mean((2, 3), keepdim=True)
        result: Tensor = x * torch.sigmoid(self.up(F.silu(self.down(pixel))))
        return result


def test_sides_of_one_are_corrected_by_rule_whatever_the_width() -> None:
    few, more = (
        nn.Sequential(*(Squeezed(8 + 4 * i) for i in range(depth))).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]  # torch's stubs lack it
        )
        for depth in (2, 5)
    )
    x = torch.randn(2, 8, 12, 12).contiguous(memory_format=torch.channels_last)
    assert 0 < sum(corrections(more, x)) == sum(corrections(few, x)) <= 4


class Relaid(nn.Module):
    """Gradients that are not laid out as torch describes them, in each of several layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3) for _ in range(depth))
        self.pad = nn.ReflectionPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.pad(layer(x).contiguous(memory_format=torch.channels_last)).contiguous()
        return x


def test_layouts_alike_are_corrected_together() -> None:
    x = torch.randn(2, 8, 12, 12)
    assert 0 < sum(corrections(Relaid(4), x)) == sum(corrections(Relaid(2), x))


def lies_turned(name: str) -> Any:
    """An op that copies a square. It is described as contiguous, but lies transposed."""

    @torch.library.custom_op(f"outcore_tests::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.t().clone(memory_format=torch.contiguous_format).t()

    op.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
    return op


turned, turned_gradient = lies_turned("turned_square"), lies_turned("turned_gradient")
turned.register_autograd(lambda _, gradient: turned_gradient(gradient))


class Turned(nn.Module):
    """A result does not lie as it is described, nor does its gradient; both are viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.behind(turned(self.before(x).t().tanh()).t().tanh())
        return result


@torch.library.custom_op("outcore_tests::of_its_own", mutates_args=())
def of_its_own(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.random.default_rng().random(x.shape) > 0.5)


of_its_own.register_fake(torch.empty_like)
of_its_own.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_a_forward_that_gives_something_else_is_told() -> None:
    """If it has to run again for a backward op that is not as described, in the first step."""

    class Drawn(Turned):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = of_its_own(turned(self.before(x).t().tanh()).t())
            return result

    torch._dynamo.reset()
    module, x = Drawn(), torch.randn(64, 64)
    call = torch.compile(module, backend=Backend(budget="1GiB", strict=True))
    with pytest.raises(StepError, match="Run the step again"):
        call(x).sum().backward()
    for _ in range(STEPS):
        module.zero_grad()
        result = call(x)
        result.sum().backward()
        straight = 1 - turned(module.before(x).t().tanh()).t() ** 2
        assert module.before.bias.grad is not None
        expected = ((result != 0) * straight).sum(0)
        torch.testing.assert_close(module.before.bias.grad, expected)


def late(backend: Any, dropped: int) -> list[Tensor]:
    """Gradients, if before each step `dropped` calls are made that nobody differentiates."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x, seen = Turned(), torch.randn(64, 64), []
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        for _ in range(dropped):
            call(x)
        module.zero_grad()
        norm_of(call(x)).backward()
        seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return seen


@pytest.mark.parametrize("dropped", [0, 2 * MOST_STEPS_WITHOUT_BACKWARD])
def test_a_backward_is_checked_however_late_it_comes(dropped: int) -> None:
    backend = Backend(budget="1GiB", strict=True)
    assert same([late(backend, dropped)], [late("aot_eager", dropped)])
    assert backend.engine is not None
    assert [graph.corrections for graph in backend.engine.graphs] == [2]
    assert backend.report().state == "in-core", "it has a plan, although few calls come back"


def has_one_without_backward(returns: Returns) -> bool:
    return returns.missing >= 1


def test_a_call_that_begins_anew_is_one_without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would run a program for calls that nobody differentiates."""
    monkeypatch.setattr(Returns, "ceased", property(has_one_without_backward))
    programs = []
    forward_only = Plans.forward_only_program

    def noted(self: Plans, *args: Any) -> Any:
        programs.append(args)
        return forward_only(self, *args)

    monkeypatch.setattr(Plans, "forward_only_program", noted)
    backend = Backend(budget="1GiB", strict=True)
    assert same([late(backend, 0)], [late("aot_eager", 0)])
    assert not programs


class Reshaped(nn.Module):
    """A result does not lie as described, so that a view of it has to be a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        flat = turned(self.before(x)).reshape(-1)
        result: Tensor = self.behind(flat.tanh().view(len(x), 64))
        return result


@pytest.mark.parametrize("dynamic", [False, None])
def test_other_sizes_of_a_graph_that_a_correction_gave_a_copy(dynamic: bool | None) -> None:
    """Workspaces of one graph say something of others only if they have the same ops."""

    def trained(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, seen = Reshaped(), []
        call = torch.compile(module, backend=backend, dynamic=dynamic) if backend else module
        for rows in [64] * STEPS + [48] * STEPS:
            module.zero_grad()
            norm_of(call(torch.ones(rows, 64))).backward()
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return seen

    backend = Backend(budget="1GiB", strict=True)
    assert same([trained(backend)], [trained(None)])
    assert backend.engine is not None
    first, second = backend.engine.graphs
    assert first.ops == second.ops != first.status.kind


def norm_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def test_what_torch_remembers_of_other_traces_is_not_taken() -> None:
    """torch describes a layer norm's gradient as permuted like the input; kernels do not do so."""
    shape, strides = (4, 64, 32), (2048, 1, 64)

    def described() -> tuple[int, ...]:
        with FakeTensorMode():
            x, mean = torch.empty_strided(shape, strides), torch.empty(4, 64, 1)
            args = (x, x, [32], mean, mean, torch.empty(32), torch.empty(32))
            gradient, *_ = NORM_BACKWARD(*args, [True, True, True])
            return tuple(gradient.stride())

    assert described() == strides
    with as_kernels():
        assert described() == (2048, 32, 1)
    assert described() == strides


def test_the_last_that_wants_other_layouts_undoes_them() -> None:
    """One thread may compile while another captures again."""
    before = decomposition_table[NORM_BACKWARD]
    first, second = as_kernels(), as_kernels()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert decomposition_table[NORM_BACKWARD] is not before
    second.__exit__(None, None, None)
    assert decomposition_table[NORM_BACKWARD] is before


class Overlapping(nn.Module):
    """Two inputs that share memory, and the first is changed: torch makes one input of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = hidden(), hidden()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.first(x.clone())
        x.add_(1)
        result: Tensor = found[: len(y)] + self.second(y.clone())
        return result


def overlapping(backend: Any) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Overlapping()
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        x = torch.randn(ROWS, 32)
        module.zero_grad()
        mean_square(call(x, x[: ROWS // 2])).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_inputs_that_overlap_and_one_is_changed() -> None:
    plain = overlapping("eager")
    roomy = Backend(budget="1GiB")
    assert same([overlapping(roomy)], [plain])
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    backend = Backend(budget=int(peak * 0.8), policy="recompute-all")
    assert same([overlapping(backend)], [plain])
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes


class Forwarded(nn.Module):
    """Forward-mode derivatives, for which torch makes tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = hidden()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(self.hidden, (x,), (torch.ones_like(x),))[1]
        return result


def test_tensors_without_memory_are_refused() -> None:
    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Forwarded()
        mean_square(torch.compile(module, backend=backend)(torch.ones(64, 32))).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    with pytest.warns(UserWarning, match="is not a plain strided tensor"):
        found = gradients(Backend(budget="1GiB"))
    assert same([found], [gradients("aot_eager")])


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.linalg.solve(self.weight, x)
        return result


@pytest.mark.skipif(
    not has_effects(torch.ops.aten._linalg_check_errors.default),
    reason="before torch 2.13 the graph does not have it",
)
def test_checks_for_errors_are_planned() -> None:
    backend = Backend(budget="1GiB", strict=True)
    module = Solved()
    call = torch.compile(module, backend=backend)
    for _ in range(PROFILED_STEPS + 1):
        call(torch.ones(8, 8)).sum().backward()
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    assert any("_linalg_check_errors" in op.target for op in graph.planned.problem.trace.ops)
    with torch.no_grad():
        module.weight.zero_()
    with pytest.raises(RuntimeError, match="singular"):
        call(torch.ones(8, 8))
    with torch.no_grad():
        module.weight.copy_(torch.eye(8))
    call(torch.ones(8, 8)).sum().backward()


class Inverse(torch.autograd.Function):
    """Has checks for errors in its backward, too."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        result: Tensor = torch.linalg.solve(weight, x)
        ctx.save_for_backward(weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, result = ctx.saved_tensors
        of_x = torch.linalg.solve(weight.T, gradient)
        return -of_x @ result.T, of_x


class Inverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weight = layer.weight @ layer.weight.T + 10 * torch.eye(64)
            solve: Any = Inverse.apply if number % 2 else torch.linalg.solve
            x = solve(weight, torch.relu(layer(x)).T).T + torch.linalg.cholesky(weight).mean()
        return x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_ops_with_effects_move_nothing_out_of_order() -> None:
    def trained(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Inverses()
        call = torch.compile(module, backend=backend)
        return train(module, call, [x], mean_square, PROFILED_STEPS + 2)

    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    budget = tight_budget(Inverses(), [x], mean_square, share=0.7)
    backend = Backend(budget=budget, policy="pooch", strict=True)
    assert same(trained(backend), trained("aot_eager"))
    counts = backend.report().counts
    assert counts.offload + counts.recompute


@torch.library.custom_op("outcore_tests::named", mutates_args=())
def named(x: Tensor, how: str) -> Tensor:
    return x * 2


named.register_fake(lambda x, _: torch.empty_like(x))
named.register_autograd(
    lambda ctx, gradient: (named(gradient, ctx.how), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "how", inputs[1]),
)


class Named(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.layer = names, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.tanh(named(self.layer(x), name))
        return x


def test_text_that_ops_get_is_no_name_of_a_tensor() -> None:
    """Though it looks like one in generated code, whose names are `s` and a number."""
    torch.manual_seed(0)
    names = [f"{letter}{number}" for letter in "skr" for number in range(0, 60, 2)]
    module = Named([*names, "it's s3", 'a "k4" \\', "\\"])
    backend = Backend(budget="1GiB", policy="keep-all", strict=True)
    call, x = torch.compile(module, backend=backend), torch.randn(4, 8)
    seen = []
    for run in (module, call):
        for _ in range(STEPS):
            module.zero_grad()
            norm_of(run(x)).backward()
        seen.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert same([seen[0]], [seen[1]])
