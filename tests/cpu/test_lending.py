"""A graph at smaller sizes runs the plan that it has for larger ones, within the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend, aten
from outcore.capture.rewrites import cross_entropy
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.measure import Reading, resident_bytes
from outcore.runtime.budget import engine
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import alike, workspaces
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.step import metered_step
from outcore.runtime.step.visit import Visit
from tests.cpu.queues import LateDevice
from tests.cpu.training import PROFILED_STEPS

BUDGET = 8 << 20
LARGE, SMALL = 16000, 14000
LAYERS, SIDES = 12, 16


class Scaled(nn.Module):
    """Layers that each save a map of `SIDES` times as many numbers as the input has."""

    def __init__(self, sides: int = SIDES) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(sides, 1) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.sigmoid(x * scale)
        return x.square().mean()


class Reduced(Scaled):
    """The same after a large input, which is read only there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(8, SIDES, -1).mean(0))


def noted_peaks(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[PlannedGraph, Visit], bool]
) -> list[tuple[bool, int]]:
    """A list to which each metered step of a graph adds `what` of it, and its peak."""
    torch._dynamo.reset()
    gc.collect()
    metered_step._stop_all()  # that earlier tests left under way
    found: list[tuple[bool, int]] = []
    metered = PlannedGraph.metered

    def noted(self: PlannedGraph, reading: Reading, visit: Visit) -> None:
        found.append((what(self, visit), reading.peak_bytes()))
        metered(self, reading, visit)

    monkeypatch.setattr(PlannedGraph, "metered", noted)
    return found


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """For each metered step of a graph, whether it ran a plan that was lent, and its peak."""

    def is_lent(graph: PlannedGraph, _: Visit) -> bool:
        return graph.profiling is not None and graph.profiling.lent is not None

    return noted_peaks(monkeypatch, is_lent)


def plans(backend: Backend) -> list[Planned | None]:
    assert backend.engine is not None
    return [status.planned for status in backend.engine.registry.known()]


def backend_of(budget: int = BUDGET) -> Backend:
    return Backend(budget=budget, policy="swap-all", strict=True)


def test_a_checked_step_of_it_is_within_the_budget(peaks: list[tuple[bool, int]]) -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 1) + [SMALL] * 3:
        call(torch.full((1, n), 0.5)).backward()
    large, small = plans(backend)
    assert large is not None
    assert small is not None
    assert small.problem.profile.source is Source.ESTIMATED
    assert small.plan.choices == large.plan.choices
    assert max(peak for lent, peak in peaks if lent) <= BUDGET
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= BUDGET


@pytest.mark.parametrize("tries", [False, True])
def test_on_a_gpu_it_is_metered_once_unless_cudnn_tries_algorithms(
    monkeypatch: pytest.MonkeyPatch, tries: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tries)
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 1):
        call(torch.full((1, n), 0.5)).backward()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(engine.Engine, "readings", partial(engine.Engine.readings, on_gpu))
    for planned in (False, not tries, True):
        call(torch.full((1, SMALL), 0.5)).backward()
        assert (plans(backend)[-1] is not None) == planned


def test_checked_steps_hold_inputs_that_the_plan_does_not(peaks: list[tuple[bool, int]]) -> None:
    """Nobody holds the input but the checked step, which may have to begin again."""
    given, budget = 8 * SIDES * LARGE * 4, 2 * BUDGET
    backend = backend_of(budget)
    call = torch.compile(Reduced(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 1) + [LARGE - 100] * 2:
        call(torch.rand(8 * SIDES, n)).backward()
    large, _ = plans(backend)
    assert large is not None
    assert 0 in large.external.gone
    assert not any(lent for lent, _ in peaks), "it has no room for the input"
    assert max(peak for _, peak in peaks) + given <= budget, "the meter began after it was made"


def test_not_with_several_calls_at_once(peaks: list[tuple[bool, int]]) -> None:
    """The plan says what one call holds beside the others, which are not planned anew."""
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 4) + [SMALL] * 4:
        losses = [call(torch.full((1, n), 0.5)) for _ in range(3)]
        for loss in losses:
            loss.backward()
    large, _ = plans(backend)
    assert large is not None
    assert large.calls == 3
    assert not any(lent for lent, _ in peaks)
    assert max(peak for _, peak in peaks[-4:]) <= BUDGET


def test_not_to_another_network() -> None:
    backend = backend_of()
    wide = torch.compile(Scaled(), backend=backend, dynamic=False)
    narrow = torch.compile(Scaled(SIDES - 4), backend=backend, dynamic=False)
    twin = torch.compile(Scaled(), backend=backend, dynamic=False)
    for _ in range(PROFILED_STEPS + 1):
        wide(torch.full((1, LARGE), 0.5)).backward()
    for _ in range(2):
        narrow(torch.full((1, LARGE), 0.5)).backward()
        twin(torch.full((1, SMALL), 0.5)).backward()
    first, *others = plans(backend)
    assert first is not None
    assert others == [None, None]


def test_not_where_more_is_held_by_now() -> None:
    """Between the checked step and the next one, something else has taken memory."""
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 1) + [LARGE - 500]:
        call(torch.full((1, n), 0.5)).backward()
    more = torch.zeros(BUDGET // 3 // 4)
    call(torch.full((1, LARGE - 500), 0.5)).backward()
    large, small = plans(backend)
    assert large is not None
    assert small is None
    assert len(more)


def test_what_is_predicted_counts_what_is_held_by_now() -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 1) + [SMALL] * 3:
        call(torch.full((1, n), 0.5)).backward()
    _, small = plans(backend)
    assert small is not None
    assert backend.engine is not None
    more = 1000
    beside = backend.engine.plans.planner.beside(small, small.external_bytes + more)
    for before, after in ((small.predicted, beside.predicted), (small.in_core, beside.in_core)):
        assert after.peak(Tier.DEVICE) == before.peak(Tier.DEVICE) + more
        assert after.seconds == before.seconds


def test_what_later_graphs_need_stays_free() -> None:
    """The first graph would fit in-core at its smaller size, but then the second would not fit."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Scaled(), Scaled()

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.one.scales:
                x = torch.sigmoid(x * scale)
            torch._dynamo.graph_break()
            for scale in self.other.scales:
                x = torch.sigmoid(x * scale)
            return x.square().mean()

    budget = 3 * BUDGET // 2
    backend = backend_of(budget)
    call = torch.compile(Two(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 4) + [SMALL] * (PROFILED_STEPS + 2):
        call(torch.full((1, n), 0.5)).backward()
    first, _, again, last = plans(backend)
    assert first is not None
    assert again is not None
    assert last is not None
    assert again.left_bytes >= first.left_bytes
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget


def test_host_memory_of_the_largest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """To register it again takes long. The largest size may come seldom."""
    asked: list[int | None] = []
    reserve = QueuedDriver.reserve

    def noted(self: QueuedDriver, nbytes: Mapping[Tier, int]) -> None:
        asked.append(nbytes.get(Tier.HOST))
        reserve(self, nbytes)

    monkeypatch.setattr(QueuedDriver, "reserve", noted)
    late = partial(QueuedDriver, LateDevice())
    monkeypatch.setattr(engine, "open_driver", lambda _, folder, __: late(folder))
    gc.collect()
    backend = backend_of(2 * BUDGET + resident_bytes(torch.device("cpu")))
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in [LARGE] * (PROFILED_STEPS + 2) + [SMALL, SMALL - 100] * 6 + [SMALL - 200] * 3:
        call(torch.full((1, n), 0.5)).backward()
    assert all(plans(backend))
    assert len(asked) == 4
    assert asked[0]
    assert len(set(asked)) == 1


def test_a_graph_that_was_made_for_its_sizes_can_run_in_core() -> None:
    """Its halves are made only now."""
    module, backend = Scaled(), backend_of()
    call = torch.compile(module, backend=backend, dynamic=True)
    for n in (LARGE, SMALL):
        module.zero_grad()
        call(torch.full((1, n), 0.5)).backward()
    expected = [scale.grad for scale in module.scales]
    backend.close()
    module.zero_grad()
    call(torch.full((1, SMALL), 0.5)).backward()
    for scale, gradient in zip(module.scales, expected, strict=True):
        assert gradient is not None
        assert scale.grad is not None
        assert torch.equal(scale.grad, gradient)


class Volumes(nn.Module):
    """Convolutions of volumes with few numbers, which torch computes itself in a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(4, 4, 3, padding=1) for _ in range(3 * LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x.square().mean()


def test_a_batch_of_one_needs_larger_workspaces(peaks: list[tuple[bool, int]]) -> None:
    budget = 13 << 18  # less than one row needs in-core, whatever workspaces this CPU needs
    backend = backend_of(budget)
    call = torch.compile(Volumes(), backend=backend, dynamic=True)
    for rows in [4] * (PROFILED_STEPS + 1) + [1] * 3:
        call(torch.full((rows, 4, 8, 8, 64), 0.5)).backward()
    assert max(peak for _, peak in peaks) <= budget
    assert any(lent for lent, _ in peaks)
    _, one = plans(backend)
    assert one is not None
    assert one.plan.moves


class Skipping(nn.Module):
    """A convolution with a workspace, between the uses of maps that backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(1) for _ in range(LAYERS))
        self.layer = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [x * scale for scale in self.scales]
        y = self.layer(x + sum(each.mean() for each in maps))
        for each in maps:
            y = y + each
        loss: Tensor = y.mean()
        return loss


@pytest.mark.parametrize("sizes", [(48, 64, 48), (64, 48)])
def test_workspaces_are_known_from_other_sizes_or_estimated(
    sizes: tuple[int, ...], peaks: list[tuple[bool, int]]
) -> None:
    budget = 9 << 18
    backend = backend_of(budget)
    call = torch.compile(Skipping(), backend=backend, dynamic=True)
    for side in sizes:
        call(torch.full((1, 4, 8, 8, side), 0.5)).backward()
    assert max(peak for _, peak in peaks) <= budget


class Convolved(nn.Module):
    """Its pooling has an input of 512 KiB a sample, and the second convolution one of 128 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        halved = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        return torch.relu(self.second(halved)).square().mean()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="there they are not")
@pytest.mark.parametrize("frozen", [False, True])
def test_workspaces_are_known_from_sizes_whose_gradients_are_made_together(*, frozen: bool) -> None:
    """For large inputs, two ops make the gradients of a convolution, or one of outcore's own."""
    torch._dynamo.reset()
    backend, module = backend_of(1 << 30), Convolved()
    module.second.requires_grad_(requires_grad=not frozen)
    call = torch.compile(module, backend=backend, dynamic=True)
    for side in [32] * (PROFILED_STEPS + 1) + [96]:
        call(torch.ones(4, 3, side, side)).backward()
    assert backend.engine is not None
    small, large = backend.engine.graphs
    assert small.ops != large.ops
    assert small.planned is not None
    known = small.planned.problem.profile.workspace_bytes
    traces = small.captured.trace, large.captured.trace
    assert alike(*traces)
    estimated = workspaces(known, *traces, on_cpu=True)
    assert backend.engine.plans._workspaces(large) == estimated
    made = [n for op, n in zip(large.ops, estimated, strict=True) if "convolution" in op]
    whole = [n for op, n in zip(small.ops, known, strict=True) if "convolution" in op]
    assert len(made) == len(whole) + (not frozen)
    assert max(made) > max(whole) > 0
    back = workspaces(estimated, *reversed(traces), on_cpu=True)
    assert all(a >= b for a, b in zip(back, known, strict=True)), "they do not shrink"


class Classified(nn.Module):
    """The loss is a part of the model."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.zeros(len(x), dtype=torch.long)
        return nn.functional.cross_entropy(self.last(x), target)


def test_plans_go_to_sizes_at_which_scores_are_few() -> None:
    """The gradient of cross-entropy is made by blocks of rows if there are many."""
    torch._dynamo.reset()
    classes = 1024
    rows = cross_entropy.LEAST_BLOCK_BYTES // (4 * classes)
    backend = backend_of(resident_bytes(torch.device("cpu")) + (48 << 20))
    call = torch.compile(Classified(classes), backend=backend)
    for samples in (*(4 * rows,) * (PROFILED_STEPS + 2), rows // 2, rows // 2):
        call(torch.rand(samples, 16)).backward()
    assert backend.engine is not None
    first, second = backend.engine.registry.known()
    assert aten.CROSS_ENTROPY in first.kind
    assert first.kind == second.kind


def test_plans_go_to_sizes_at_which_no_input_is_large() -> None:
    """Gradients of convolutions and of pooling are made by other ops if their input is large."""
    torch._dynamo.reset()
    backend = backend_of(resident_bytes(torch.device("cpu")) + (48 << 20))
    call = torch.compile(Convolved(), backend=backend)
    for samples in (*(16,) * (PROFILED_STEPS + 2), 1, 1):
        call(torch.rand(samples, 3, 64, 64)).backward()
    large, small = plans(backend)
    assert large is not None
    assert small is not None
    assert small.problem.profile.source is Source.ESTIMATED
    targets = [op.target for op in large.problem.trace.ops]
    assert [op.target for op in small.problem.trace.ops] == targets
    assert len([target for target in targets if target.startswith("outcore.")]) == 2
