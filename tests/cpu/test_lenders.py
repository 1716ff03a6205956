"""Streams of sizes that hardly return: the largest so far is planned for the others."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import HostMemoryError, InfeasibleError
from outcore.execute.arena import own_arena
from outcore.execute.queued import QueuedDriver
from outcore.measure import resident_bytes
from outcore.runtime import by_size
from outcore.runtime.budget import engine
from outcore.runtime.budget.plans import Plans
from outcore.runtime.conduct.first_steps import AGAIN
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.shown import Shown
from outcore.runtime.graphs.status import MOST_STEPS_WITHOUT_BACKWARD
from tests.cpu.queues import LateDevice
from tests.cpu.test_lending import BUDGET, LARGE, Scaled, backend_of, plans
from tests.cpu.test_lending import peaks as peaks
from tests.cpu.training import PROFILED_STEPS

STREAM = [15000, LARGE, 14500, 13000, 15500, 14800, 15700, 16500, 13500, 15900, 16300, 14100]
"""No size returns. From the fourth on there are three others, one of them larger but for 16500."""


class Pair(nn.Module):
    """A graph for each of two inputs; the first one waits while the second one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Scaled(), Scaled()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        y = y + x
        for scale in list(self.other.scales)[:3]:
            y = torch.sigmoid(y * scale)
        return y.square().mean()


def row(n: int) -> Tensor:
    return torch.full((1, n), 0.5)


def gradients(module: nn.Module, call: Callable[..., Tensor], *sizes: int) -> list[Tensor]:
    module.zero_grad()
    call(*map(row, sizes)).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def lent(backend: Backend) -> list[bool]:
    """For each graph, whether its checked steps run a plan for larger sizes."""
    assert backend.engine is not None
    return [graph.status.lent is not None for graph in backend.engine.graphs]


def kept(backend: Backend) -> list[bool]:
    """For the two graphs that were made last, whether checked steps keep everything."""
    assert backend.engine is not None
    profiled = [graph.profiling for graph in backend.engine.graphs[-2:]]
    return [profiling is not None and profiling.keeps for profiling in profiled]


def is_predicted(backend: Backend) -> bool:
    """Whether the latest metered step was within the prediction, and that within the budget."""
    assert backend.engine is not None
    backend.engine.close_step()
    report = backend.report()
    measured, predicted = report.measured_peak_bytes, report.predicted_peak_bytes
    assert measured is not None
    assert predicted is not None
    return measured <= predicted <= report.budget_bytes


def test_the_largest_is_planned_from_its_checked_step(peaks: list[tuple[bool, int]]) -> None:
    module, backend = Scaled(), backend_of()
    plain = torch.compile(module, backend="aot_eager", dynamic=True)
    expected = [gradients(module, plain, n) for n in STREAM]
    call = torch.compile(module, backend=backend, dynamic=True)
    for i, (n, gradient) in enumerate(zip(STREAM, expected, strict=True)):
        assert all(map(torch.equal, gradients(module, call, n), gradient))
        assert lent(backend)[-1] == (i > 2 and n < max(STREAM[:i]))
        if lent(backend)[-1]:
            assert is_predicted(backend)
    assert backend.report().state == "planned"
    assert [plan is not None for plan in plans(backend)] == [n in {LARGE, 16500} for n in STREAM]
    assert max(peak for _, peak in peaks) <= BUDGET


def test_smaller_sizes_run_the_program_of_larger_ones() -> None:
    """Once patterns tell their traces, nothing is lowered or generated for them."""
    module, backend = Scaled(), backend_of()
    plain = torch.compile(module, backend="aot_eager", dynamic=True)
    sizes = [*STREAM, *(n - 50 for n in STREAM)]
    expected = [gradients(module, plain, n) for n in sizes]
    call = torch.compile(module, backend=backend, dynamic=True)
    code = []
    for n, gradient in zip(sizes, expected, strict=True):
        assert all(map(torch.equal, gradients(module, call, n), gradient))
        assert backend.engine is not None
        graph = backend.engine.graphs[-1]
        if graph.status.lent is not None and graph.profiling is not None:
            assert graph.status.lent.plan.moves
            assert is_predicted(backend)
            code.append(graph.profiling.checked.code)
    assert len(code) > 10
    assert len({*code[3:]}) <= 2, "one for each lender"


@pytest.mark.parametrize("budget", [2 * BUDGET, 32 * BUDGET], ids=["moved", "kept"])
def test_new_sizes_leave_the_cache_of_a_gpu_be(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    device = LateDevice()
    monkeypatch.setattr(engine, "open_driver", lambda *_: QueuedDriver(device))
    gc.collect()
    backend = backend_of(budget + resident_bytes(torch.device("cpu")))
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    trims = []
    for n in (*STREAM, *(n - 50 for n in STREAM)):
        call(row(n)).backward()
        trims.append(device.trims)
    assert backend.engine is not None
    planned = backend.engine.graphs[-1].status.lent
    assert planned is not None
    assert planned.everything_kept == (budget > 2 * BUDGET)
    assert trims[len(STREAM)] == trims[-1]


def test_a_plan_that_was_lent_was_made_once() -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM:
        call(row(n)).backward()
    assert backend.engine is not None
    for status in backend.engine.registry.known():
        assert (status.planning_seconds > 0) == (status.follows is not None)
        status.planning_seconds = 2.0
    spent = backend.report().planning_seconds
    assert spent is not None
    assert spent % 2 == 0


@contextmanager
def held_more(nbytes: int) -> Iterator[None]:
    more = torch.zeros(nbytes // 4)
    yield
    del more


@pytest.mark.parametrize("divisor", [4, 16])
def test_more_is_held_by_now(divisor: int) -> None:
    """Plans that are too small are made anew, although their sizes are not called any more."""
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    with held_more(BUDGET // divisor):
        for n in (15700, 12000, 11000, 10000):
            call(row(n)).backward()
            assert lent(backend)[-1]
            assert is_predicted(backend)


def test_more_is_held_as_the_lender_is_called() -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    with held_more(BUDGET // 4):
        for _ in range(PROFILED_STEPS + 1):
            call(row(LARGE)).backward()
        assert is_predicted(backend)
    with held_more(2 * BUDGET // 3), pytest.raises(InfeasibleError):
        call(row(LARGE)).backward()


@pytest.mark.skipif(own_arena() is None, reason="nothing counts what tensors hold")
def test_garbage_is_not_held() -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    before = plans(backend)
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [torch.zeros(BUDGET // 3 // 4)]
        cycle.append(cycle)
        del cycle
        call(row(15700)).backward()
    finally:
        gc.enable()
    assert lent(backend)[-1]
    assert plans(backend)[1] is before[1]


def test_where_no_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is profiled, and no other is tried while as much is held.

    One is tried with more room than what is held, and without.
    """
    tried = []

    def refused(_: Plans, graph: PlannedGraph, __: Shown, *, as_profiled: bool) -> Planned:
        tried.append(graph)
        assert not as_profiled
        raise HostMemoryError(reason="there is none", needed_bytes=1)

    monkeypatch.setattr(Plans, "first", refused)
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:7]:
        call(row(n)).backward()
    assert backend.engine is not None
    assert tried == [backend.engine.graphs[1]] * 2
    assert plans(backend) == [None] * 7


def test_a_plan_may_need_all_the_room_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def first(self: Plans, graph: PlannedGraph, shown: Shown, *, as_profiled: bool) -> Planned:
        tried.append(shown)
        if len(tried) == 1:
            raise HostMemoryError(reason="there is none", needed_bytes=1)
        return real(self, graph, shown, as_profiled=as_profiled)

    real = Plans.first
    monkeypatch.setattr(Plans, "first", first)
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:7]:
        call(row(n)).backward()
    assert any(plans(backend))


def test_lenders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_size, "KEPT_GRAPHS", 4)
    monkeypatch.setattr(by_size, "KEPT_OPS", 0)
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in (*STREAM[:3], *range(14000, 13000, -100)):
        call(row(n)).backward()
    gc.collect()
    assert len(lent(backend)) == 4
    assert [plan is not None for plan in plans(backend)].count(True) == 1
    assert lent(backend).count(True) == 3


def test_several_calls_before_the_first_backward(peaks: list[tuple[bool, int]]) -> None:
    """Each leaves as much to the next ones, whatever their sizes, as if it were profiled."""
    budget = 5 << 20
    backend = backend_of(budget)
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in range(10500, 8700, -300):
        losses = [call(row(each)) for each in (n, n - 1000, n + 5000)]
        torch.stack(losses).sum().backward()
        assert not all(lent(backend)[-3:]) or is_predicted(backend)
    assert lent(backend).count(True) > 5
    assert max(peak for _, peak in peaks) <= budget


def test_several_graphs_of_sizes_of_their_own(peaks: list[tuple[bool, int]]) -> None:
    """What waits leaves as much to the second graph, whatever its size, as if it were profiled."""
    budget, module = 9 << 20, Pair()
    backend, plain = backend_of(budget), copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    sizes = [*zip(STREAM, (9000, 7000, 27000, 5000, 12000, 26000, 28000, 9500), strict=False)]
    expected = [gradients(plain, plain, n, k) for n, k in sizes]
    for (n, k), gradient in zip(sizes, expected, strict=True):
        assert all(map(torch.equal, gradients(module, call, n, k), gradient))
    assert lent(backend)[::2].count(True) == 4
    assert any(lent(backend)[1::2])
    assert max(peak for _, peak in peaks) <= budget


def test_later_calls_find_as_much_room_whoever_lends() -> None:
    """A size that came twice, and plans made anew for more that is held, leave as much, too."""
    backend, module = backend_of(9 << 20), Pair()
    call = torch.compile(module, backend=backend, dynamic=True)
    for n, k in [*((n, 2100) for n in STREAM[:5]), (14000, 9000), (14000, 9000), (13500, 9000)]:
        gradients(module, call, n, k)
    with held_more((9 << 20) // 40):
        for n, k in [(13100, 9000), (12900, 9000), (12800, 38000)]:
            gradients(module, call, n, k)
            assert lent(backend)[-2]


def test_what_comes_after_finds_no_room() -> None:
    """What waits is moved away. Later sizes leave that room free."""
    module = Pair()
    backend, plain = backend_of(9 << 20), copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    for _ in range(PROFILED_STEPS + 4):
        call(row(LARGE), row(2100)).backward()
    assert backend.engine is not None
    times = []
    for n, k in [(13000, 40000)] * 3 + [(12900, 39000), (12800, 39500)]:
        found = gradients(module, call, n, k)
        assert all(map(torch.equal, found, gradients(plain, plain, n, k)))
        times.append(backend.engine.eviction.times)
    assert times == [times[0]] * 5
    assert times[0] > 0


def test_a_graph_that_nobody_differentiates_follows_no_plan() -> None:
    backend = backend_of()
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    follows = []
    for _ in range(MOST_STEPS_WITHOUT_BACKWARD + 2):
        call(row(15700))
        assert backend.engine is not None
        follows.append(backend.engine.graphs[-1].status.follows is not None)
    assert follows[0]
    assert not follows[-1]


def test_where_much_is_free_everything_is_kept(peaks: list[tuple[bool, int]]) -> None:
    """No size returns, and nobody knows how much later calls will need: half of it stays free."""
    module, budget = Pair(), 8 * BUDGET
    plain = torch.compile(module, backend="aot_eager", dynamic=True)
    backend = backend_of(budget)
    call = torch.compile(module, backend=backend, dynamic=True)
    written = list[int]()
    for n in STREAM:
        expected = gradients(module, plain, n, n)
        assert all(map(torch.equal, gradients(module, call, n, n), expected))
        written.append(backend.report().disk_bytes_written)
    assert written[2] > 0, "these are profiled with the floor program"
    assert written[3] == written[-1], "there are three other sizes"
    engine = backend.engine
    assert engine is not None
    growths = [engine.plans._growth(graph) for graph in engine.graphs]
    assert sum(growth > 1 for growth in growths) == 2, "the largest sizes of both graphs"
    assert min(growths) == 1, "smaller sizes do not make a whole step smaller"
    with held_more(budget * 5 // 8):
        gradients(module, call, 13700, 13700)
    assert backend.report().disk_bytes_written > written[-1]
    assert max(peak for _, peak in peaks) <= budget


def test_calls_that_wait_together_keep_everything_only_if_all_of_them_can(
    peaks: list[tuple[bool, int]],
) -> None:
    """One call alone needs less than half of the budget, and several more than all of it."""
    budget = 4 * BUDGET
    backend = backend_of(budget)
    call = torch.compile(Scaled(), backend=backend, dynamic=True)
    for n in STREAM[:7]:
        torch.stack([call(row(n)) for _ in range(5)]).sum().backward()
    written = backend.report().disk_bytes_written
    torch.stack([call(row(14200)) for _ in range(5)]).sum().backward()
    assert backend.report().disk_bytes_written > written
    assert max(peak for _, peak in peaks) <= budget


def test_more_calls_than_ever_wait(peaks: list[tuple[bool, int]]) -> None:
    module, budget = Pair(), 5 * BUDGET
    backend = backend_of(budget)
    plain = torch.compile(module, backend="aot_eager", dynamic=True)
    call = torch.compile(module, backend=backend, dynamic=True)

    def often(once: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: torch.stack([once(*given) for _ in range(6)]).sum()

    expected = gradients(module, often(plain), 13600, 13600)  # not while a step is metered
    for n in STREAM[:6]:
        gradients(module, call, n, n)
    written = backend.report().disk_bytes_written
    gradients(module, call, 13700, 13700)
    assert backend.report().disk_bytes_written == written, "everything is kept"
    assert all(map(torch.equal, gradients(module, often(call), 13600, 13600), expected))
    assert backend.report().disk_bytes_written > written
    assert max(peak for _, peak in peaks) <= budget


class Repeated(nn.Module):
    """A graph that saves little, and one after it that needs most of the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(()) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for scale in self.scales:
            x = torch.sigmoid(x * scale)
        torch._dynamo.graph_break()
        y = x if y is None else y * x.mean()
        return torch.sin(y.repeat(8, 1) * self.scales[0]).sum()


def test_what_comes_after_finds_room_without_a_disk() -> None:
    budget = 20 * max(STREAM) * 4
    backend = Backend(budget=budget, disk_budget=0, strict=True)
    call = torch.compile(Repeated(), backend=backend, dynamic=True)
    for n in STREAM:
        call(row(n)).backward()


def test_larger_sizes_than_ever_are_taken_to_need_as_much_more() -> None:
    budget = 120 * max(STREAM) * 4
    backend = Backend(budget=budget, disk_budget=0, strict=True)
    call = torch.compile(Repeated(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    assert kept(backend) == [True, True]
    call(row(3 * max(STREAM))).backward()
    assert kept(backend) == [False, False]


@pytest.mark.parametrize("growth", [1.0, inf])
def test_nothing_is_kept_where_no_size_was_called_lately(
    growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plans, "_growth", lambda *_: growth)
    backend = Backend(budget=120 * max(STREAM) * 4, strict=True)
    call = torch.compile(Repeated(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n)).backward()
    assert kept(backend)[0] is (growth == 1.0)


def test_nothing_is_kept_once_a_call_found_no_room() -> None:
    """The later graph has sizes of its own. It never needed as much before."""
    budget = 120 * max(STREAM) * 4
    backend = Backend(budget=budget, disk_budget=0, strict=True)
    call = torch.compile(Repeated(), backend=backend, dynamic=True)
    for n in STREAM[:6]:
        call(row(n), row(n - 1)).backward()
    assert kept(backend) == [True, True]
    large = row(32 * max(STREAM) // 5)
    with pytest.raises(InfeasibleError) as caught:
        call(row(13700), large)
    assert AGAIN in caught.value.__notes__
    del caught  # it holds what the call made
    call(row(13600), large).backward()
    assert kept(backend) == [False, False]
