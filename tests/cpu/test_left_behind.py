"""Calls that stay outstanding: one whose result is kept, retained graphs, late backward calls."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled as profiling

from outcore import Backend
from outcore.errors import CaptureError
from outcore.execute import link
from outcore.measure import resident_bytes
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.runner import Runner
from outcore.runtime.step import store
from tests.cpu.training import PROFILED_STEPS, away, back, same

HABITS = ["retained", "kept", "late"]
STEPS = 72


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))


def gradients(module: nn.Module, call: Any, habit: str, steps: int) -> Iterator[list[Tensor]]:
    """The gradients of each backward call."""
    before: Tensor | None = None
    kept = call(torch.ones(256, 64)) if habit == "kept" else None
    for step in range(steps):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(step))
        loss = call(x).square().mean()
        if habit != "late":
            loss.backward(retain_graph=habit == "retained")
        elif before is not None:
            before.backward()
        before = loss
        yield [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
    del kept


@pytest.mark.parametrize("habit", HABITS)
def test_it_is_planned_although_a_call_is_always_outstanding(habit: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = layers()
    plain, backend = copy.deepcopy(module), Backend(budget="7MiB")
    call = torch.compile(module, backend=backend, dynamic=False)
    traced = torch.compile(plain, backend="aot_eager", dynamic=False)
    expected = [away(each) for each in gradients(plain, traced, habit, STEPS)]
    found = gradients(module, call, habit, STEPS)
    assert all(same([each], [back(expected[step])]) for step, each in enumerate(found))
    for _ in gradients(module, call, habit, STEPS):  # the latest steps may have a new plan
        if (report := backend.report()).measured_peak_bytes is not None:
            break
    assert report.state in ("planned", "in-core"), "which is a plan that keeps everything"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_no_peak_is_metered_beside_a_call_of_an_older_plan_that_holds_more() -> None:
    """The latest call keeps its data for one step with the new plan. The budget has room for it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, held = layers(), list[Tensor]()
    backend = Backend(budget="8.6MiB")
    call = torch.compile(module, backend=backend, dynamic=False)
    peaks = []
    for step, _ in enumerate(gradients(module, call, "retained", STEPS)):
        if step == STEPS - 20:
            held.append(torch.ones(1 << 18))
        report = backend.report()
        if held and report.state == "planned":
            peaks.append((report.measured_peak_bytes, report.predicted_peak_bytes))
    measured, predicted = peaks[-1]
    assert measured is not None
    assert predicted is not None
    assert all(m is None or p is None or m <= p for m, p in peaks)


@pytest.mark.parametrize("where", ["partial", "stand_in"])
def test_an_interrupt_as_a_forward_call_ends_leaves_no_call(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing watched its name yet, or had it."""
    torch._dynamo.reset()
    backend = Backend(budget="1GiB")
    call = torch.compile(layers(), backend=backend, dynamic=False)
    for _ in range(2):
        step(call)
    assert backend.engine is not None
    assert not len(backend.engine.stores)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(call)
    assert not len(backend.engine.stores)
    assert not backend.engine.stores.counts()
    for _ in range(PROFILED_STEPS):
        step(call)
    assert "outstanding" not in str(backend.report())


class Halves(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        found: Tensor = self.second(y)
        return found


def test_a_step_in_which_a_graph_is_planned_again_gives_no_peak() -> None:
    """Its call followed the plan before. One more step is metered, for the new plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = Halves(), Backend(budget="1GiB", policy="keep-all")
    call = torch.compile(module, backend=backend, dynamic=False)
    for _ in gradients(module, call, "plain", 20):
        pass
    engine = backend.engine
    assert engine is not None
    first, _ = engine.graphs
    assert first.planned is not None
    assert engine.metering.peak_bytes is not None
    engine.metering.forget_peak()
    loss = call(torch.randn(1024, 64)).square().mean()
    assert engine.metering.running is not None
    first.settle(engine.plans.tighter(first, first.planned))
    engine.metering.forget_peak()
    loss.backward()
    assert len(engine.metering.running.visits) == 2
    backend.report()
    assert engine.metering.running is None
    assert engine.metering.peak_bytes is None
    for _ in gradients(module, call, "plain", 3):
        pass
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes


def test_a_metered_step_that_is_left_behind_keeps_no_engine() -> None:
    """Only its own thread could end it, and that is busy with something else."""
    torch._dynamo.reset()
    begun, over = threading.Event(), threading.Event()
    made: list[Any] = []

    def begin() -> None:
        module, backend = layers(), Backend(budget="1GiB")
        call = torch.compile(module, backend=backend, dynamic=False)
        call(torch.randn(8, 64))
        assert backend.engine is not None
        assert backend.engine.metering.running is not None
        made.extend((module, backend, call))
        del module, backend, call
        begun.set()
        over.wait()

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        assert begun.wait(60)
        driver = ref(made[1].engine.driver)
        made.clear()
        torch._dynamo.reset()
        gc.collect()
        assert driver() is None
    finally:
        over.set()
        thread.join()


def test_it_is_planned_again_although_a_result_is_kept() -> None:
    """The kept call does not count as one that a new plan has to wait for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, held = layers(), []
    backend = Backend(budget="5MiB")
    call = torch.compile(module, backend=backend, dynamic=False)
    for step, _ in enumerate(gradients(module, call, "kept", STEPS)):
        if step == STEPS - 10:
            assert backend.report().state in ("in-core", "planned")
            held.append(torch.zeros(1 << 18))
    assert backend.engine is not None
    assert sum(graph.status.growth.replans for graph in backend.engine.graphs) == 1


# ---- interrupts, and threads that go on elsewhere ------------------------------------------------


def step(call: Any) -> None:
    call(torch.ones(256, 64)).square().mean().backward()


ROOM = 900_000
"""Bytes for a step of the layers: less than it needs in-core, more than its floor."""


def stepped(steps: int) -> tuple[Any, Backend]:
    """Layers through a Backend whose plan offloads, after so many steps, and that Backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = layers()
    budget = resident_bytes(torch.device("cpu")) + ROOM
    backend = Backend(budget=budget, policy="swap-all", drift="off")
    call = torch.compile(module, backend=backend, dynamic=False)
    for _ in range(steps):
        step(call)
    assert steps == 1 or backend.report().counts.offload
    return call, backend


class Interrupting(dict[Any, Any]):
    """A dict that is interrupted once, as soon as it has given something away."""

    ready = True

    def pop(self, *given: Any) -> Any:
        found = super().pop(*given)
        if self.ready and found is not None:
            self.ready = False
            raise KeyboardInterrupt
        return found


def test_an_interrupted_drop_leaves_no_call_that_counts() -> None:
    call, backend = stepped(8)
    assert backend.engine is not None
    stores, (graph,) = backend.engine.stores, backend.engine.graphs
    kept = call(torch.ones(256, 64))
    before = ref(kept)
    stores._live = Interrupting(stores._live)
    with pytest.raises(KeyboardInterrupt):
        step(call)
    assert len(stores.of(graph)) == stores.counts()[graph] == 1
    lost = [s for each in stores._calls.values() for n, s in each.items() if n not in stores._live]
    assert len(lost) == 1
    for _ in range(3):
        step(call)
    assert len(stores.of(graph)) == 1, "the one that is kept"
    assert graph.status.at_once.most == 2
    assert not lost[0].crossing
    assert before() is kept


def test_an_interrupt_loses_no_room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    call, backend = stepped(8)
    driver: Any = backend.engine and backend.engine.driver
    spill, old, armed = driver._spill, link.Barrier.__init__, [True]

    def interrupted(self: Any, action: Any = None, *, last: bool = False) -> None:
        if action is not None and armed:
            armed.clear()
            raise KeyboardInterrupt
        old(self, action, last=last)

    monkeypatch.setattr(link.Barrier, "__init__", interrupted)
    size = spill.file.nbytes
    with pytest.raises(KeyboardInterrupt):
        step(call)
    gc.collect()
    for _ in range(3):
        step(call)
    spill.drain()
    assert not spill._held
    assert not spill._leaving
    assert spill.file.nbytes == size


def test_a_meter_that_another_thread_gave_up_ends_with_the_next_call() -> None:
    call, backend = stepped(1)
    assert profiling()
    thread = threading.Thread(target=backend.close)
    thread.start()
    thread.join()
    assert profiling(), "only this thread can end it"
    step(call)
    assert not profiling()


def test_a_call_that_runs_again_in_backward_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    backend = Backend(budget="64MiB", policy="swap-all")
    call = torch.compile(layers(), backend=backend, dynamic=False)
    old, fails = Runner._gradients, [True]

    def wrong_once(*given: Any) -> Any:
        if fails:
            fails.clear()
            raise CaptureError(reason="a test")
        return old(*given)

    monkeypatch.setattr(Runner, "_gradients", wrong_once)
    monkeypatch.setattr(PlannedGraph, "correct", lambda graph, _: graph.unprofile())
    call(torch.ones(256, 64)).square().mean().backward(retain_graph=True)
    gc.collect()
    for _ in range(6):
        step(call)
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.status.at_once.expected == 1
