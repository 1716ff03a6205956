"""Budgets also hold for memory outside ops: around graphs, and storages larger than tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import cross_entropy

from outcore import Backend, Report, handle, wrap
from outcore.allocators import Card
from outcore.allocators.ideal import Ideal
from outcore.capture import capture
from outcore.errors import InfeasibleError, SpillError
from outcore.execute.arena import Arena, own_arena
from outcore.ir.hardware import Tier
from outcore.ir.memory import crossing_bytes, private_bytes
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.policies import lean_plans
from outcore.runtime.budget import contention
from outcore.runtime.budget.registry import IDLE_STEPS
from outcore.runtime.budget.residency import Residency
from outcore.runtime.conduct.conductor import Conductor
from outcore.runtime.graphs import calls
from outcore.runtime.graphs.calls import gradient_bytes
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.history import CallsAtOnce
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.planning import solving
from outcore.runtime.planning.shares import Shares
from outcore.runtime.settings import options
from tests.cpu.training import PROFILED_STEPS, away, back, mean_square, same, snapshot

STEPS = 8


class Tower(nn.Module):
    """Layers of one width."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Shift(nn.Module):
    """Its backward has no op: gradients are its tangents."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1024, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def long_loss(result: Tensor) -> Tensor:
    return result.exp().sin().cos().tanh().mean()


def train(
    make: Callable[[], nn.Module], backend: Any, x: Tensor, loss: Callable[[Tensor], Tensor]
) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make()
    call = torch.compile(module, backend=backend)
    found = []
    for _ in range(STEPS):
        module.zero_grad()
        result = loss(call(x))
        result.backward()
        found.append(away(snapshot(module, result.detach())))
        del result
    return list(map(back, found))


def inside(backend: Backend) -> None:
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_a_backward_without_ops_is_counted() -> None:
    x = torch.ones(1024, 64)
    with pytest.raises(InfeasibleError):
        train(Shift, Backend(budget="1MiB"), x, long_loss)
    backend = Backend(budget="4MiB")
    train(Shift, backend, x, long_loss)
    inside(backend)


class Rows(nn.Module):
    """Between two graphs, autograd alone keeps many tensors that are smaller than 32 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Tower(), Tower()

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        row = x[:120]
        for _ in range(100):
            row = torch.tanh(row)
        return x + row.sum()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.between(self.before(x)))
        return result


@pytest.mark.skipif(not isinstance(own_arena(), Arena), reason="without, they are not known")
@pytest.mark.parametrize("part", [0.9, 0.7])
def test_small_tensors_that_autograd_alone_holds_are_counted(part: float) -> None:
    x = torch.ones(4096, 64)
    in_core = Backend(budget="1GiB")
    expected = train(Rows, in_core, x, mean_square)
    most = in_core.report().measured_peak_bytes
    assert most is not None
    backend = Backend(budget=int(most * part), policy="swap-all")
    assert same(train(Rows, backend, x, mean_square), expected)
    assert backend.report().state == "planned"
    inside(backend)


def test_storages_larger_than_inputs_are_counted() -> None:
    whole = torch.ones(1024 * 64 * 8)
    x = torch.empty(0).set_(whole.untyped_storage(), 0, (1024, 64), (64, 1))
    del whole
    with pytest.raises(InfeasibleError):
        train(Tower, Backend(budget="2.5MiB"), x, mean_square)
    backend = Backend(budget="4.5MiB")
    train(Tower, backend, x, mean_square)
    inside(backend)


class Tagged(Tensor):
    """A tensor subclass that intercepts every call, like MONAI's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            raise TypeError("aten ops are not for me")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_inputs_of_a_subclass_are_the_tensors_they_are() -> None:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    backend = Backend(budget="2.5MiB")
    found = train(Tower, backend, x.as_subclass(Tagged), mean_square)
    assert same(found, train(Tower, "eager", x, mean_square))
    assert backend.report().state == "planned"


class Classes(nn.Module):
    """A result, and so a tangent, much larger than all that is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Tower(8, 2), nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def test_what_the_loss_hands_back_is_counted_once() -> None:
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    backend = Backend(budget="64MiB")
    train(Classes, backend, x, lambda y: cross_entropy(y, torch.zeros(4096, dtype=torch.long)))
    inside(backend)
    report = backend.report()
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes - report.measured_peak_bytes < 2 * 2**20  # tangent: 4 MiB


def leaves_gradients(backend: Any, x: Tensor) -> Tensor:
    """Train; gradients are freed between forward and backward, as with Lightning."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        loss = call(x).square().mean()
        module.zero_grad()
        loss.backward()
    return snapshot(module, loss.detach())[-1]


def leaves_results(backend: Any, x: Tensor) -> Tensor:
    """Train; the results of a step stay alive until the next ones replace them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(Tower(512, 4), nn.Linear(512, 1024))
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        module.zero_grad()
        result = call(x)
        loss = result.square().mean()
        loss.backward()
    return snapshot(module, loss.detach())[-1]


class Centered(nn.Module):
    """Its backward does not need the input, so an input that nobody else holds is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tower(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x - 0.5)
        return result


def takes_its_input(backend: Any, x: Tensor) -> Tensor:
    return one_step_like_another(Centered, backend, lambda call: call(x.clone()))


def one_step_like_another(
    make: Callable[[], nn.Module], backend: Any, run: Callable[[Any], Tensor]
) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make()
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        module.zero_grad()
        loss = run(call).square().mean()
        loss.backward()
    return snapshot(module, loss.detach())[-1]


class Twice(nn.Module):
    """Two results that get the same gradient tensor from the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = Tower(512, 4), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.body(x)
        return inner, self.other(inner)


def shares_gradients(backend: Any, x: Tensor) -> Tensor:
    return one_step_like_another(Twice, backend, lambda call: torch.add(*call(x)))


def leaves_nothing(backend: Any, x: Tensor) -> Tensor:
    return train(Tower, backend, x[:, :64], mean_square)[-1][-1]


@pytest.mark.parametrize(
    ("leaves", "rows", "budget"),
    [
        (leaves_gradients, 2048, "40MiB"),
        (leaves_results, 1024, "34MiB"),
        (leaves_nothing, 2048, "9MiB"),
        (takes_its_input, 2048, "40MiB"),
        (shares_gradients, 2048, "44MiB"),
    ],
)
def test_what_is_left_of_the_step_before_is_told(
    leaves: Callable[[Any, Tensor], Tensor], rows: int, budget: str
) -> None:
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))
    backend = Backend(budget=budget)
    found = leaves(backend, x)
    inside(backend)
    report = backend.report()
    told = [note[:8] for note in report.notes if "were held during its forward call" in note]
    assert report.state == "planned"
    assert told == ["4.00 MiB"] * (leaves in {leaves_gradients, leaves_results})
    assert torch.equal(found, leaves("eager", x))


def test_an_error_tells_what_is_left_of_the_step_before() -> None:
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InfeasibleError) as error:
        leaves_results(Backend(budget="29MiB"), x)
    (told,) = error.value.__notes__
    assert told.startswith("outcore: 4.00 MiB more are held than as the first step began")


class Frozen(nn.Module):
    """A body that is not trained and a head, in separate graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Tower().requires_grad_(requires_grad=False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        result: Tensor = self.head(x)
        return result


def test_inputs_of_a_subclass_reach_graphs_that_are_not_planned() -> None:
    """Graphs without gradients, and graphs that cannot be planned."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = train(Frozen, Backend(budget="1GiB"), x.as_subclass(Tagged), mean_square)
    assert same(found, train(Frozen, "eager", x, mean_square))
    backend = Backend(budget="1GiB")
    backend.close()
    with pytest.warns(UserWarning, match="closed"):
        found = train(Tower, backend, x.as_subclass(Tagged), mean_square)
    assert same(found, train(Tower, "eager", x, mean_square))


class Words(nn.Module):
    """A body, then a loss over many words in a separate graph, which peaks in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Tower(layers=16), nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.body(x))
        torch._dynamo.graph_break()
        return cross_entropy(x * 2, torch.zeros(len(x), dtype=torch.long))


def test_a_budget_that_is_named_will_do_unless_it_is_the_least_that_may() -> None:
    """While a graph of the step has no plan yet, the step may turn out to need more."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    budget, refusals = 5 * 2**20, []
    for _ in range(6):
        try:
            train(Words, Backend(budget=budget), x, torch.Tensor.sum)
        except InfeasibleError as error:
            refusals.append((error.at_least, str(error)))  # the error would hold tensors
            budget = error.floor_bytes
        else:
            break
    else:
        pytest.fail(f"refused again and again: {refusals}")
    assert refusals
    assert all(at_least for at_least, _ in refusals[:-1])


class Scored(nn.Module):
    """Returns the loss and the scores, and is given a gradient for both."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(layers=12), nn.Linear(64, 512)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tower(x)
        torch._dynamo.graph_break()
        scores = self.head(x)
        return cross_entropy(scores, y)[None], scores


def scored(backend: Any, steps: int = STEPS) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, random = Scored(), torch.Generator().manual_seed(0)
    call = torch.compile(module, backend=backend, dynamic=False)
    x, y = torch.randn(2048, 64, generator=random), torch.arange(2048) % 512
    found = []
    for _ in range(steps):
        module.zero_grad()
        torch.autograd.backward(call(x, y), [torch.ones(1), torch.zeros(2048, 512)])
        found.append(away(snapshot(module, torch.zeros(()))))
    return list(map(back, found))


@pytest.mark.parametrize("budget", ["20MiB", "22MiB"])
def test_what_later_graphs_are_given_for_backward_is_left_to_them(budget: str) -> None:
    """Otherwise the first graph holds so much that the second one has no plan.

    The floor then rises with the budget.
    """
    backend = Backend(budget=budget, policy="pooch")
    assert same(scored(backend), scored("aot_eager"))
    assert backend.report().state == "planned"
    inside(backend)


def test_a_graph_without_a_plan_is_left_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that is outstanding while it runs is planned again, to hold less."""
    monkeypatch.setattr(Shares, "_seen_to_take", lambda *_: 0)
    backend = Backend(budget="20MiB", policy="pooch", strict=True)
    scored(backend, steps=PROFILED_STEPS)
    assert backend.engine is not None
    first, second = backend.engine.registry.active()
    assert first.planned is not None
    assert second.planned is None
    assert first.status.asked_bytes
    backend = Backend(budget="20MiB", policy="pooch", strict=True)
    found = scored(backend, steps=14)
    assert backend.engine is not None
    first, second = backend.engine.registry.active()
    assert not first.status.asked_bytes
    assert first.status.left_at_least > 0
    assert backend.report().state == "planned"
    inside(backend)
    assert same(found, scored("aot_eager", steps=14))


class Detected(nn.Module):
    """Returns boxes that no loss uses: their graph is outstanding while later ones are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.boxes = nn.Linear(64, 64), nn.Linear(64, 4)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        boxes = self.boxes(x).sigmoid()
        torch._dynamo.graph_break()
        return torch.relu(self.second(x)), boxes


def test_graphs_do_not_wait_for_one_that_nobody_differentiates() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = wrap(Detected(), "1GiB")
    for _ in range(PROFILED_STEPS + 1):
        result, boxes = module(torch.randn(256, 64))
        mean_square(result).backward()
        del result, boxes
    engine = handle(module).engine
    assert engine is not None
    assert [graph.planned is not None for graph in engine.graphs] == [True, False, True]


class Sparse(nn.Module):
    """A trunk of one size, then a head whose number of rows varies."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.trunk(x)
        torch._dynamo.graph_break()
        return mean_square(self.head(x[rows]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.narrow(torch.relu(self.wide(x)))
        return result


def test_gradients_of_sizes_that_take_turns_are_not_added_up() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = wrap(Sparse(), "6MiB", policy="pooch")
    for step in range(PROFILED_STEPS + 12):
        module.zero_grad()
        module(torch.randn(1024, 64), torch.arange(600 + 4 * (step % 12))).backward()
    engine = handle(module).engine
    assert engine is not None
    trunk, *heads = engine.graphs
    assert len(heads) > 8
    assert trunk.planned is not None
    shares = engine.plans.planner.shares(trunk, engine.registry.active())
    assert 0 < shares.late_bytes() <= gradient_bytes(heads[-1].captured.trace)


def test_a_plan_for_which_the_disk_has_no_room_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shares, "_seen_to_take", lambda *_: 0)
    backend = Backend(budget="20MiB", policy="pooch", strict=True)
    scored(backend, steps=PROFILED_STEPS)
    assert backend.engine is not None
    first, _ = backend.engine.registry.active()
    execution = first.execution
    assert execution is not None
    assert first.status.asked_bytes

    def refuse(nbytes: object) -> None:
        raise SpillError(directory="/", reason=f"no room for {nbytes}")

    monkeypatch.setattr(backend.engine.driver, "reserve", refuse)
    assert backend.engine.contention.leaving_more(first, execution) is execution
    assert first.status.left_at_least == 0


def test_others_are_counted_by_the_trace_that_they_have_now() -> None:
    """A trace may have been corrected since, after a check against kernels."""
    backend = Backend(budget="1GiB")
    in_call_order(backend)
    assert backend.engine is not None
    first, second = backend.engine.registry.active()
    planner = backend.engine.plans.planner
    shares, hardware = planner.shares(first, [first, second]), planner.solver.hardware()
    known = shares._calls(second, hardware)
    assert shares._calls(second, hardware) is known
    second.captured = replace(second.captured, trace=replace(second.captured.trace))
    assert shares._calls(second, hardware) is not known


class Skips(nn.Module):
    """All of its maps are read again in backward, and at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            maps.append(x)
        for each in reversed(maps[:-1]):
            x = x + each
        return x


def test_a_graph_that_is_profiled_anew_within_a_metered_step() -> None:
    """More came to be held since its first call, whose times are not those of what runs now."""
    torch._dynamo.reset()
    backend = Backend(budget="2.5MiB", strict=True)
    leader, module = (torch.compile(m, backend=backend) for m in (Tower(layers=2), Skips()))
    x = torch.ones(512, 64)
    mean_square(leader(x)).backward()
    mean_square(module(x)).backward()
    assert backend.engine is not None
    _, graph = backend.engine.graphs
    profiling = graph.profiling
    assert profiling is not None
    held = torch.ones(profiling.most_resident_bytes // 4)
    result = module(x)
    assert graph.profiling is not profiling
    mean_square(leader(x)).backward()
    mean_square(result).backward()
    del held


def test_what_captures_leave_is_no_part_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers may leave results of the step in reference cycles, for example at a graph break."""

    def littering(*given: Any) -> Any:
        with unset_fake_temporarily():
            circle: list[Any] = [torch.ones(16 << 18)]
        circle.append(circle)
        gc.collect(1)  # makes the cycle old: dynamo collects young objects in the end
        return capture(*given)

    monkeypatch.setattr("outcore.capture.source.capture", littering)
    torch._dynamo.reset()
    module = nn.ModuleList((Tower(), Tower(layers=10)))
    backend = Backend(budget="1GiB", policy="pooch")
    calls = [torch.compile(m, backend=backend, dynamic=False) for m in module]
    gc.disable()  # a collection may or may not happen
    try:
        for _ in range(STEPS):
            module.zero_grad()
            mean_square(calls[1](calls[0](torch.ones(2048, 64)))).backward()
    finally:
        gc.enable()
    engine = backend.engine
    assert engine is not None
    held = [graph.planned.external_bytes for graph in engine.graphs if graph.planned]
    assert len(held) == 2
    assert max(held) < 16 << 20


def test_results_that_captures_leave_do_not_keep_steps_from_ending() -> None:
    """Otherwise nothing would ever free them, because outcore would see no step begin."""
    torch._dynamo.reset()
    module = Tower()
    backend = Backend(budget="1GiB", policy="pooch")
    call = torch.compile(module, backend=backend, dynamic=False)
    gc.disable()
    try:
        for step in range(STEPS):
            module.zero_grad()
            if not step:
                circle: list[Any] = [call(torch.ones(2048, 64))]
                circle.append(circle)
                del circle
            mean_square(call(torch.ones(2048, 64))).backward()
    finally:
        gc.enable()
    assert backend.engine is not None
    assert backend.engine.steps.number == STEPS
    inside(backend)


def in_call_order(backend: Any, steps: int = STEPS) -> list[list[Tensor]]:
    """Train two graphs; while the backward of the first one runs, the second is outstanding."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    modules = nn.ModuleList((Tower(), Tower(layers=10)))
    calls = [torch.compile(m, backend=backend, dynamic=False) for m in modules]
    found = []
    for _ in range(steps):
        modules.zero_grad()
        first, second = (mean_square(call(x)) for call in calls)
        first.backward()
        second.backward()
        found.append(away(snapshot(modules, (first + second).detach())))
        del first, second
    return list(map(back, found))


def peak_in_call_order() -> int:
    roomy = Backend(budget="1GiB", policy="pooch")
    in_call_order(roomy)
    inside(roomy)
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    return peak


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_backward_calls_in_the_order_of_the_forward_calls(share: float) -> None:
    backend = Backend(budget=int(peak_in_call_order() * share), policy="pooch", strict=True)
    assert same(in_call_order(backend), in_call_order("aot_eager"))
    assert backend.report().state == "planned"
    inside(backend)


def test_those_in_turn_have_room_for_what_the_others_took_since() -> None:
    """The first graph is planned while the second has no plan and may need little."""
    peak = peak_in_call_order()
    for steps, again in ((PROFILED_STEPS, False), (PROFILED_STEPS + 1, True)):
        backend = Backend(budget=int(peak * 0.9), policy="pooch")
        in_call_order(backend, steps)
        engine = backend.engine
        assert engine is not None
        first, second = engine.registry.active()
        assert first.planned is not None
        assert second.planned is not None
        takes = private_bytes(second.planned.problem.trace, second.planned.program)
        external = first.planned.external
        assert (first.planned.external_bytes >= external.base_bytes + takes) == again
        assert first.planned.problem.outside_bytes >= first.planned.external_bytes


def test_a_mix_without_a_plan_does_not_stand_in_the_way_of_others() -> None:
    backend = Backend(budget=int(peak_in_call_order() * 0.9), policy="pooch")
    in_call_order(backend)
    engine = backend.engine
    assert engine is not None
    first, second = engine.registry.active()
    execution = first.execution
    assert execution is not None
    planned, plans = execution.planned, engine.plans
    second.status.at_once = CallsAtOnce(50, 50)
    first.observed.unchecked = first.observed.returned.note(0, {second: 50})
    with pytest.raises(InfeasibleError):
        plans.beside_calls(first, planned)
    assert engine.contention.beside_calls(first, execution) is execution
    assert not first.observed.unchecked
    assert planned.external_bytes < first.status.refused.external_bytes < inf
    assert [note for note in backend.report().notes if "outstanding calls of other graphs" in note]
    more = planned.external.base_bytes + 5_000
    again = plans.for_calls(first, planned)
    assert again.external_bytes == planned.external_bytes
    again = plans.beside_more(first, planned, more, 0)
    assert 0 <= again.external_bytes - planned.external_bytes <= 5_000
    assert again.external.base_bytes == more
    second.status.at_once = CallsAtOnce()
    assert second.planned is not None
    second.settle(second.planned)
    assert first.observed.unchecked
    assert engine.contention.beside_calls(first, execution) is execution
    assert first.status.refused.external_bytes == inf


def test_a_plan_that_lacks_as_much_as_the_one_before_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts on others to hold less, and makes them check their plans."""
    backend = Backend(budget=int(peak_in_call_order() * 0.9), policy="pooch")
    in_call_order(backend)
    engine = backend.engine
    assert engine is not None
    first, second = engine.registry.active()
    plans, lacking, made = engine.plans, 1 << 20, []

    def again(_: PlannedGraph, planned: Planned) -> Planned:
        made.append(lacking)
        return planned

    monkeypatch.setattr(plans, "beside_calls", again)
    monkeypatch.setattr(plans, "lacking_bytes", lambda *_: lacking)

    def steps(number: int) -> None:
        for _ in range(number):
            for graph, other in ((first, second), (second, first)):
                other.observed.unchecked = graph.observed.unchecked = (
                    True  # as if each saw the other outstanding
                )
                assert graph.execution is not None
                engine.contention.beside_calls(graph, graph.execution)

    steps(3)
    assert made == [1 << 20] * 2
    lacking = 1 << 19
    steps(3)
    assert made[2:] == [1 << 19] * 2
    lacking = 0
    steps(1)
    assert first.status.refused.external_bytes == second.status.refused.external_bytes == inf


@pytest.mark.parametrize(
    ("most", "tried", "refused"),
    [(1 << 30, [5, 10, 20, 40], inf), (20, [5, 10, 20, 40], 140), (4, [5, 3, 6], 105)],
)
def test_a_graph_that_is_asked_leaves_more_until_it_holds_less(
    most: int, tried: list[int], refused: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first 30 bytes are unused room; no plan leaves more than `most` bytes more."""
    backend = Backend(budget=int(peak_in_call_order() * 0.9), policy="pooch")
    in_call_order(backend)
    engine = backend.engine
    assert engine is not None
    first, _ = engine.registry.active()
    execution, left, made = first.execution, [100], list[int]()
    assert execution is not None

    def leaving(_: PlannedGraph, planned: Planned, more: int) -> Planned:
        made.append(more)
        if more > most:
            raise InfeasibleError(budget_bytes=1, floor_bytes=2, op="", policy="", needed_bytes=2)
        left.append(100 + more)
        return replace(planned)

    def left_bytes(planned: Planned) -> int:
        return 100 if planned is execution.planned else left[-1]

    monkeypatch.setattr(engine.plans, "leaving_more", leaving)
    monkeypatch.setattr(Planned, "left_bytes", property(left_bytes))
    monkeypatch.setattr(contention, "kept_bytes", lambda _: 1000 - max(0, left[-1] - 130))
    first.status.asked_bytes = {5, 3}
    found = engine.contention.leaving_more(first, execution)
    assert made == tried
    assert first.status.refused.left_bytes == refused
    assert (found is execution) == (left == [100])


def test_those_that_saw_it_wait_hear_of_a_graph_that_comes_back_or_runs_in_core() -> None:
    backend = Backend(budget="1GiB")
    in_call_order(backend)
    assert backend.engine is not None
    first, second = backend.engine.registry.active()
    for _ in range(2):  # the first call clears what the last step set
        assert first.execution is not None
        backend.engine.contention.beside_calls(first, first.execution)
    assert not first.observed.unchecked
    for _ in range(2 * IDLE_STEPS):
        backend.engine.steps.call(begins=True)
    assert backend.engine.registry.active() == []
    Conductor(backend.engine, second).begin_call()
    assert first.observed.unchecked
    assert not second.observed.unchecked
    first.observed.unchecked = False
    second.retire("")
    assert first.observed.unchecked


def test_what_a_graph_is_given_by_one_that_waits_is_counted_once() -> None:
    """All that the first holds is the input of the second, and external to neither."""
    backend = Backend(budget="1GiB", policy="swap-all")
    torch._dynamo.reset()
    modules = nn.ModuleList((nn.Linear(4, 64), Tower(layers=2)))
    first, second = (torch.compile(m, backend=backend, dynamic=False) for m in modules)
    x = torch.randn(8192, 4)
    for _ in range(STEPS):
        modules.zero_grad()
        mean_square(second(first(x))).backward()
    assert backend.engine is not None
    one, two = backend.engine.registry.active()
    assert two.planned is not None
    assert one.planned is not None
    given = 8192 * 64 * x.itemsize
    assert crossing_bytes(one.planned.program) >= given
    assert private_bytes(one.planned.problem.trace, one.planned.program) == 0
    assert 0 <= two.planned.external_bytes < given


class Wide(nn.Module):
    """Its hidden layer is eight times as wide as its input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.back(torch.tanh(self.there(x)))
        return result


class Pieces(nn.Module):
    """Parts whose results are detached, so they have no backward; then a wide part."""

    def __init__(self, parts: int = 6) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Tower(layers=4) for _ in range(parts))
        self.wide = Wide()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = x
        for part in self.parts:
            held = part(held)
            torch._dynamo.graph_break()
        result: Tensor = self.wide(held.detach())
        return result, held


def in_pieces(budget: str, steps: int) -> tuple[Pieces, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Pieces(), torch.randn(2048, 64)
    if budget:
        wrap(module, budget=budget)
    for _ in range(steps):
        module.zero_grad()
        result, held = module(x)  # held to the end of the step, with its autograd graph
        loss = mean_square(result)
        loss.backward()
        del result, held
    return module, loss.detach()


def test_what_nobody_differentiates_makes_room_for_what_somebody_does() -> None:
    """After some steps it keeps everything, 12 MiB, which leaves too little for the wide part."""
    plain, loss = in_pieces("", 1)
    module, found = in_pieces("16MiB", 40)
    assert torch.equal(found, loss)
    assert same([snapshot(module, found)], [snapshot(plain, loss)])
    report = handle(module).report()
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes
    engine = handle(module).engine
    assert engine is not None
    assert any(graph.planned is not None for graph in engine.graphs)


def test_little_is_counted_if_nobody_differentiates_and_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, _ = in_pieces("1GiB", 30)
    counted, count = [], Residency.external_bytes

    def counting(held: Residency, graph: Any, inputs: Any) -> int:
        counted.append(graph)
        return count(held, graph, inputs)

    monkeypatch.setattr(Residency, "external_bytes", counting)
    x = torch.randn(2048, 64)
    for _ in range(4):
        module.zero_grad()
        result, held = module(x)
        mean_square(result).backward()
        del result, held
    if isinstance(own_arena(), Arena):
        assert len(counted) <= len(module.parts)


def test_captures_do_not_go_through_all_objects_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visiting them takes longer than the rest of most captures."""
    collected, collect = [], Residency.collect

    def counting(held: Residency, *, again: bool = False) -> bool:
        collected.append(collect(held, again=again))
        return collected[-1]

    monkeypatch.setattr(Residency, "collect", counting)
    torch._dynamo.reset()
    towers, x = nn.ModuleList(Tower(layers=n) for n in range(1, 7)), torch.ones(64, 64)
    backend = Backend(budget="1GiB")
    calls = [torch.compile(each, backend=backend) for each in towers]
    for found in (0, 1, 1):  # a single one, once the first step is over
        result = x
        for call in calls:
            result = call(result)
        result.sum().backward()
        assert sum(collected) == found


def test_a_graph_without_backward_is_no_guest_of_few_steps() -> None:
    """Figures leave out graphs that run in few steps of their own; this one runs in each step."""
    backend = Backend(budget="1GiB")
    torch._dynamo.reset()
    modules = nn.ModuleList((Tower(), Tower()))
    first, second = (torch.compile(m, backend=backend, dynamic=False) for m in modules)
    x = torch.randn(64, 64)
    for _ in range(3 * STEPS):
        mean_square(second(first(x).detach()[:32])).backward()
    report = backend.report()
    assert (report.graphs, report.others) == (2, 0)
    assert not [note for note in report.notes if "few of the latest steps" in note]


def penalized(budget: int | str) -> tuple[list[Tensor], Report | None]:
    """Train a critic with a gradient penalty, which needs gradients of gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    critic, given = Tower(layers=10), torch.randn(2048, 64)
    if budget:
        wrap(critic, budget=budget, strict=True)
    for _ in range(STEPS):
        critic.zero_grad()
        few = given[:128].clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic.forward(few).sum(), few, create_graph=True)
        loss = critic(given).mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
    return snapshot(critic, loss.detach()), handle(critic).report() if budget else None


def test_a_gradient_penalty_runs_plainly_beside_planned_calls() -> None:
    plain, _ = penalized("")
    roomy, report = penalized("1GiB")
    assert report is not None
    assert report.measured_peak_bytes is not None
    tight, planned = penalized(report.measured_peak_bytes * 3 // 4)
    assert same([plain, plain], [roomy, tight])
    assert planned is not None
    assert planned.state == "planned"
    assert planned.measured_peak_bytes is not None
    assert planned.predicted_peak_bytes is not None
    assert planned.measured_peak_bytes <= planned.predicted_peak_bytes <= planned.budget_bytes


def test_torch_says_so_where_gradients_of_gradients_are_asked_of_a_planned_call() -> None:
    critic = wrap(Tower(), budget="1GiB")
    few = torch.randn(8, 64).requires_grad_()
    (slope,) = torch.autograd.grad(critic(few).sum(), few, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.norm().backward()


class Doubled(nn.Module):
    """A graph that keeps nothing for backward and is called twice a step; then a tower.

    After three steps that graph is planned, and the tower is not profiled yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tower = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), Tower()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
            x = doubled(x)
        torch._dynamo.graph_break()
        result: Tensor = self.tower(x)
        return result


@torch._dynamo.disable(recursive=False)
def doubled(x: Tensor) -> Tensor:
    return twice(x)


def twice(x: Tensor) -> Tensor:
    return x * 2 - 1


@pytest.mark.parametrize("budget", ["10MiB", "1GiB"])
def test_later_graphs_leave_what_a_graph_needs_that_keeps_nothing(budget: str) -> None:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    backend = Backend(budget=budget)
    found = train(Doubled, backend, x, mean_square)
    assert same(found, train(Doubled, "eager", x, mean_square))


def test_a_larger_budget_is_never_refused_where_a_smaller_one_will_do() -> None:
    """The graph of the loss is left what it needs, however much the one before it could keep."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    roomy = Backend(budget="1GiB", policy="pooch")
    train(Words, roomy, x, torch.Tensor.sum)
    fits = []
    for mebibytes in (6, 7, 8, 10, 12, 14):
        backend = Backend(budget=f"{mebibytes}MiB", policy="pooch")
        try:
            train(Words, backend, x, torch.Tensor.sum)
        except InfeasibleError:
            fits.append(False)
        else:
            fits.append(True)
            inside(backend)
    assert fits == sorted(fits)
    assert (fits[0], fits[-1]) == (False, True)


class Joined(nn.Module):
    """A graph that alone keeps nothing, then another; a third one joins some steps later."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.body, self.late = nn.Linear(64, 64), Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        torch._dynamo.graph_break()
        result: Tensor = self.body(x)
        return result


def test_a_graph_that_keeps_nothing_is_left_what_it_needs() -> None:
    torch._dynamo.reset()
    module, backend = Joined(), Backend(budget="1GiB", policy="swap-all")
    call = torch.compile(module, backend=backend)
    late = torch.compile(module.late, backend=backend)
    for step in range(STEPS):
        result = call(torch.ones(64, 64))
        (late(result) if step > 1 else result).sum().backward()
        del result
    assert backend.engine is not None
    assert sum(s.planned is not None for s in backend.engine.registry.statuses()) >= 2


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_optimizer_makes_for_itself_is_told(fused: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Linear(1024, 1024)
    adam = torch.optim.AdamW(module.parameters(), foreach=not fused, fused=fused)
    backend = Backend(budget="18MiB")
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        adam.zero_grad()
        call(torch.ones(16, 1024)).square().mean().backward()
        adam.step()
    told = [note for note in backend.report().notes if "an optimizer's step" in note]
    assert bool(told) is not fused


class Bulges(Tower):
    """Its layers need more memory while they run than they keep for backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(nn.functional.gelu(layer(x))) + x
        return x


def train_on(module: nn.Module, call: Any, x: Tensor) -> None:
    for _ in range(STEPS):
        module.zero_grad()
        mean_square(call(x)).backward()


def test_profiled_steps_make_way_for_what_comes_after_the_first() -> None:
    """Such as an optimizer's state: a leaner program runs, or it is an error at once."""
    for more, fits in ((600 << 10, True), (1100 << 10, True), (1300 << 10, False)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = Backend(budget="3MiB")
        module, x = Bulges(), torch.ones(1024, 64)
        call = torch.compile(module, backend=backend)
        mean_square(call(x)).backward()
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        first = graph.profiling
        assert first is not None
        assert (more > first.most_resident_bytes) == (more > 1 << 20)
        state = torch.empty(more, dtype=torch.uint8)
        module.zero_grad()
        if not fits:
            with pytest.raises(InfeasibleError) as caught:
                call(x)
            (note,) = caught.value.__notes__
            assert "MiB more are held than as the first step began" in note
            break
        mean_square(call(x)).backward()
        now = graph.profiling
        assert now is not None
        assert now.most_resident_bytes >= more
        assert (now is first) == (more < 1 << 20), "it is asked for again where it must be"
        train_on(module, call, x)
        report = backend.report()
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
        del state


def test_a_graph_that_nobody_differentiates_goes_on_beside_what_does_not_fit() -> None:
    """It does not slow down for good, and neither do others: they are not asked to hold less."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = Tower(layers=12), Backend(budget="24MiB", policy="pooch")
    call, x = torch.compile(module, backend=backend, dynamic=False), torch.randn(2048, 64)
    for _ in range(2 * STEPS):
        call(x)
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.status.returns.ceased
    assert graph.profiling is not None
    assert graph.profiling.keeping is not None
    passing = torch.empty(25 << 20, dtype=torch.uint8)
    call(x)
    del passing
    call(x)
    assert graph.may_keep


class Chained(nn.Module):
    """Several graphs of the same size."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Tower(layers=3 + i) for i in range(graphs))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


def test_what_plans_take_of_a_disk_does_not_make_others_count_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else planning takes a time that is quadratic in the number of graphs."""
    found = list[Problem]()

    def noted(problem: Problem) -> Iterable[Plan]:
        found.append(problem)
        return lean_plans(problem)

    monkeypatch.setattr(calls, "lean_plans", noted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    number = 8
    module = Chained(number)
    call = torch.compile(module, backend=Backend(budget="8MiB", policy="swap-all"), dynamic=False)
    train_on(module, call, torch.randn(1024, 64))
    assert 0 < len(found) <= 3 * number


def test_what_grows_from_step_to_step_is_planned_all_the_same() -> None:
    """Once enough is profiled, planning counts what is held, and nothing is profiled again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(budget="3MiB")
    module, x = Bulges(), torch.ones(1024, 64)
    call = torch.compile(module, backend=backend)
    grown = []
    for _ in range(PROFILED_STEPS):
        module.zero_grad()
        mean_square(call(x)).backward()
        grown.append(torch.empty(260 << 10, dtype=torch.uint8))
    assert backend.engine is not None
    assert backend.engine.graphs[0].planned is not None


@pytest.mark.parametrize(("room_bytes", "used"), [(0, True), (300 << 10, False), (2 << 20, True)])
def test_room_is_left_where_a_plan_leaves_it(
    room_bytes: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, PyTorch's allocator needs it; a budget too small to leave it is used in full."""
    budget = 4 << 20
    card = Card((budget - room_bytes) * 4 // 3, Ideal())
    assert card.rooms(budget)[0] == room_bytes
    monkeypatch.setattr(options, "_card", lambda _: card)
    monkeypatch.setattr(solving, "prepare", lambda: None)
    path = tmp_path / "plans.json"
    for plan in (None, path):
        backend = Backend(budget=budget, policy="search", plan=plan)
        train(lambda: Tower(64, 16), backend, torch.ones(1024, 64), mean_square)
        report = backend.report()
        assert report.state == "planned"
        assert report.budget_bytes == budget
        assert report.measured_peak_bytes is not None
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
        assert (report.predicted_peak_bytes > budget - (300 << 10)) == used
        (explained,) = backend.explain()
        assert explained.peak_bytes == report.predicted_peak_bytes
        backend.save_plans(path)


def test_the_room_is_that_with_which_the_allocator_loses_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 4 << 20
    card = Card(11 << 19, Ideal())
    least, most = card.rooms(budget)
    assert (least, most) == (0, 5 << 18)

    def lost_seconds(_: Card, problem: Problem, __: Program, ___: float = 0.0) -> float:
        return 1.0 if problem.budget_bytes > budget - most else 0.0

    monkeypatch.setattr(options, "_card", lambda _: card)
    monkeypatch.setattr(solving, "prepare", lambda: None)
    monkeypatch.setattr(Card, "lost_seconds", lost_seconds)
    path = tmp_path / "plans.json"
    for plan, policy, room in (
        (None, "search", most),
        (path, "search", most),
        (None, "search{seconds=60}", least),
        (None, "window", least),
    ):
        backend = Backend(budget=budget, policy=policy, plan=plan)
        train(lambda: Tower(64, 16), backend, torch.ones(1024, 64), mean_square)
        assert backend.engine is not None
        planned = backend.engine.graphs[0].planned
        assert planned is not None
        assert planned.room_bytes == room
        assert planned.predicted.peak(Tier.DEVICE) <= budget - room
        assert ("longer than predicted" in " ".join(backend.report().notes)) == (room == least)
        backend.save_plans(path)
