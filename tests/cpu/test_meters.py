"""Meters of a step's memory: by allocator counters at marks, and by profiler events."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import _profiler_enabled
from torch.profiler import profile

from outcore import Backend
from outcore.measure import Reading
from outcore.measure.counters import CounterMeter
from outcore.measure.events import EventMeter
from outcore.runtime.budget import metering
from outcore.runtime.graphs.obstacle import Obstacle
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, same, snapshot


class Heap:
    """An allocator with `Counters` that also records every change."""

    def __init__(self, held: int) -> None:
        self.held = self.most = held
        self.times: list[int] = []
        self.changes: list[int] = []

    def change(self, nbytes: int, at: int) -> None:
        self.held += nbytes
        self.most = max(self.most, self.held)
        self.times.append(at)
        self.changes.append(nbytes)

    def read(self) -> tuple[int, int]:
        return self.held, self.most

    def reset(self) -> None:
        self.most = self.held


@given(
    held=st.integers(0, 100),
    spans=st.lists(st.lists(st.integers(-50, 50), max_size=6), min_size=1, max_size=8),
)
def test_counters_tell_at_marks_what_events_tell(held: int, spans: list[list[int]]) -> None:
    clock = itertools.count(1)
    heap = Heap(held)
    meter = CounterMeter(heap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time_ns", lambda: next(clock))
        assert meter.start()
        stamps = [next(clock)]
        for span in spans:
            for change in span:
                heap.change(change, next(clock))
            meter.mark()
            stamps.append(next(clock))
        found = meter.stop()
    assert found is not None
    exact = Reading(tuple(heap.times), tuple(heap.changes))
    for start, stop in itertools.combinations(stamps, 2):
        assert found.level_bytes(stop) == exact.level_bytes(stop)
        assert found.peak_bytes(start, stop) == exact.peak_bytes(start, stop)
        assert found.workspace_bytes(start, stop) == exact.workspace_bytes(start, stop)


def test_a_clock_that_is_set_back_changes_no_order() -> None:
    heap, times, stamps = Heap(0), iter([5, 3, 9]), list[int]()
    meter = CounterMeter(heap)
    meter.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time_ns", lambda: next(times))
        for change in (1, 2):
            heap.change(change, 0)
            stamps.append(meter.mark())
        found = meter.stop()
    assert found is not None
    assert found.times == (5, 5, 7, 7, 9, 9)
    assert stamps == [6, 8]
    assert [found.level_bytes(stamp) for stamp in (*stamps, 9)] == [1, 3, 3]


def test_what_is_between_two_marks_is_that_alone() -> None:
    heap = Heap(0)
    meter = CounterMeter(heap)
    meter.start()
    stamps = [meter.mark()]
    for changes in ((1000, -900), (150, -150), (-60,), (500, -500)):
        for change in changes:
            heap.change(change, 0)
        stamps.append(meter.mark())
    found = meter.stop()
    assert found is not None
    steps = list(itertools.pairwise(stamps))
    assert [found.peak_bytes(*step) for step in steps] == [1000, 250, 100, 540]
    assert [found.workspace_bytes(*step) for step in steps] == [900, 150, 0, 500]


@pytest.mark.parametrize("over", [True, False])
def test_what_a_profiler_of_the_user_saw_is_not_read(over: bool) -> None:
    meter = EventMeter()
    assert meter.start()
    with profile(profile_memory=True):
        torch.randn(1000)
        found = None if over else meter.stop()
    found = meter.stop() if over else found
    assert found is None
    assert meter.start(), "and the next one begins as ever"
    torch.randn(1000)
    found = meter.stop()
    assert found is not None
    assert found.changes == (4000, -4000)


def test_a_profiler_around_the_optimizer_costs_no_figure() -> None:
    model = Small()
    backend = Backend(budget="1GiB")
    call = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(2 * PROFILED_STEPS + 2):
        mean_square(call(batch(step))).backward()
        if step < PROFILED_STEPS:
            with profile(profile_memory=True):
                optimizer.step()
        optimizer.zero_grad()
    report = backend.report()
    assert report.in_core_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    held = sum(p.nbytes for p in model.parameters()) * 2
    assert held + (1 << 20) < report.measured_peak_bytes <= report.in_core_peak_bytes


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_no_forked_process_goes_on_metering() -> None:
    """Between two steps, as when a DataLoader starts its workers, and between the two calls."""

    def forked() -> int:
        child = os.fork()
        if not child:
            os._exit(_profiler_enabled())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    model = Small()
    backend = Backend(budget="1GiB")
    call = torch.compile(model, backend=backend)
    metered = 0
    for step in range(2 * PROFILED_STEPS + 2):
        loss = mean_square(call(batch(step)))
        metered += _profiler_enabled()
        if step < PROFILED_STEPS - 1:
            assert not forked()
        loss.backward()
        assert not forked()
    assert metered > 1
    assert backend.report().measured_peak_bytes is not None


@pytest.mark.parametrize("part", ["all of each step", "backward"])
def test_a_profiler_in_each_step_is_told_of(part: str) -> None:
    model, x = Small(), batch(0)
    backend = Backend(budget="1GiB")
    call = torch.compile(model, backend=backend)

    def step(whole: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        with whole:
            loss = mean_square(call(x))
            with inner:
                loss.backward()

    def profiled_steps() -> None:
        for _ in range(Obstacle.ANOTHER_PROFILER.most + 2):
            watched = profile(profile_memory=True)
            step(*((watched, nullcontext()) if part != "backward" else (nullcontext(), watched)))

    with pytest.warns(UserWarning, match="another torch profiler runs") as caught:
        profiled_steps()
    said = [str(w.message) for w in caught]
    assert sum(Obstacle.ANOTHER_PROFILER.reason in each for each in said) == 1
    report = backend.report()
    assert report.state == "profiling"
    assert Obstacle.ANOTHER_PROFILER.reason in report.notes
    for _ in range(PROFILED_STEPS + 2):
        step(nullcontext(), nullcontext())
    report = backend.report()
    assert report.state == "in-core"
    assert report.in_core_peak_bytes is not None
    assert not report.notes


def test_in_a_forked_process_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = CounterMeter(Heap(0))
    meter.start()
    monkeypatch.setattr(meter, "counters", None)
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert meter.stop() is None
    assert not meter.running


def test_a_meter_that_does_not_run_is_not_ended() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        CounterMeter(Heap(0)).stop()
    meter = CounterMeter(Heap(0))
    meter.mark()
    assert not meter.sees()


class Books:
    """`Counters` that read an engine's ledger: the level at marks, and no peaks in between."""

    def __init__(self) -> None:
        self.backend: Backend | None = None

    def read(self) -> tuple[int, int]:
        assert self.backend is not None
        assert self.backend.engine is not None
        ledger = self.backend.engine.driver.ledger()  # does not visit tensors that other code makes
        assert ledger is not None
        return ledger.live_bytes, ledger.live_bytes

    def reset(self) -> None:
        pass


class Peaks(Books):
    """The same with the peaks, and with a count of how often they were read."""

    times = 0

    def read(self) -> tuple[int, int]:
        self.times += 1
        level, _ = super().read()
        return level, self._peak_bytes(anew=False)

    def reset(self) -> None:
        self._peak_bytes(anew=True)

    def _peak_bytes(self, *, anew: bool) -> int:
        assert self.backend is not None
        assert self.backend.engine is not None
        ledger = self.backend.engine.driver.ledger()
        assert ledger is not None
        return ledger.peak_bytes(anew)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    counted = Books()
    monkeypatch.setattr(metering, "open_meter", lambda _: CounterMeter(counted))
    yield counted
    if counted.backend is not None:
        counted.backend.close()  # a session that is not over reads the ledger when it ends
    counted.backend = None


def train(backend: Backend | str) -> list[list[torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Small()
    call = torch.compile(module, backend=backend)
    found = []
    for _ in range(PROFILED_STEPS + 3):
        module.zero_grad()
        loss = mean_square(call(batch(0, 64)))
        loss.backward()
        found.append(snapshot(module, loss.detach()))
    return found


def test_each_step_on_a_thread_of_its_own(books: Books) -> None:
    """A thread that ends before its step does leaves the meter to the next thread."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Small()
    books.backend = backend = Backend(budget="1GiB")
    call = torch.compile(module, backend=backend)

    def step() -> None:
        module.zero_grad()
        mean_square(call(batch(0, 64))).backward()

    for _ in range(PROFILED_STEPS + 3):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    report = backend.report()
    assert report.state == "in-core"
    assert not report.notes
    assert report.measured_peak_bytes is not None


def test_asking_for_a_report_meanwhile_is_safe(books: Books) -> None:
    books.backend = backend = Backend(budget="1GiB")
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.001):
            backend.report()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        found = train(backend)
    finally:
        over.set()
        asking.join()
    assert same(found, train("eager"))


def test_a_clock_that_is_set_back_in_a_step_changes_no_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it may be while the first step is metered."""
    counted, now, found = Peaks(), time.time_ns, []
    monkeypatch.setattr(metering, "open_meter", lambda _: CounterMeter(counted))
    for late in ((), range(10, 50)):
        counted.backend, counted.times = Backend(budget="1GiB"), 0
        backend = counted.backend
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: now() - (counted.times in late) * 10**9)  # noqa: B023 - called at once
            train(backend)
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        assert graph.planned is not None
        found.append(graph.planned.problem.profile.workspace_bytes)
        backend.close()
    counted.backend = None
    assert found[0] == found[1]
    assert any(found[0])


def test_a_step_is_metered_by_counters(books: Books) -> None:
    books.backend = backend = Backend(budget="1GiB")
    found = train(backend)
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes
    exact = Backend(budget="1GiB")
    assert same(found, train(exact))
    by_events = exact.report().measured_peak_bytes
    assert by_events is not None
    # Between marks, the books do not see an op's workspace.
    assert by_events / 2 < report.measured_peak_bytes <= by_events
