"""Steps whose time differs from the prediction: one new plan, same gradients, same budget.

The tests make a clock or a link slower by a factor that no busy machine reaches.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import OptionValueError, SpillError
from outcore.execute.driver import CopySpan, EmptyLane
from outcore.execute.link import Throttle
from outcore.execute.queued import QueuedDriver
from outcore.gauges import WallClock
from outcore.ir.hardware import Tier
from outcore.ir.program import Run
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.runtime import summary
from outcore.runtime.budget import engine as engines
from outcore.runtime.graphs import trial as trials
from outcore.runtime.graphs.drift import WARM_UP_STEPS, WATCHED_STEPS, Drift
from outcore.runtime.graphs.trial import TRIAL_STEPS
from outcore.runtime.step.store import Store
from outcore.runtime.step.visit import Visit
from outcore.simulate import simulate
from tests.cpu.queues import LateDevice, LateEvent
from tests.cpu.training import (
    PROFILED_STEPS,
    Broken,
    Small,
    batch,
    mean_square,
    same,
    small_planned,
    small_reference,
    snapshot,
    train,
)

PLANNED = PROFILED_STEPS + 1
"""Steps until a plan has run unmetered."""
UNTIL_TRIAL = PROFILED_STEPS + WARM_UP_STEPS + WATCHED_STEPS + 1
"""Steps before the first step of a trial, if times drift from the first planned step on."""
STEPS = UNTIL_TRIAL + TRIAL_STEPS + 3
TIGHT = "2MiB"
SLOW_LINK = "50MiB/s"
FACTOR = 1000.0


class SlowClock(WallClock):
    """Reports longer times than really passed."""

    def __init__(self, factor: float = FACTOR) -> None:
        self.factor = factor

    def seconds(self, start: int, stop: int) -> float:
        return super().seconds(start, stop) * self.factor


class Training:
    """`Small` under a budget; at step `at`, `change` is called."""

    def __init__(
        self, change: Callable[[Backend], object], *, at: int = PLANNED, **options: Any
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.module: nn.Module = Small()
        self.backend = Backend(**{"budget": TIGHT, "policy": "pooch", **options})
        self.call = torch.compile(self.module, backend=self.backend)
        self.change, self.at, self.calls = change, at, 0

    def __call__(self, x: Tensor) -> Any:
        if self.calls == self.at:
            self.change(self.backend)
        self.calls += 1
        return self.call(x)

    def run(self, steps: int = STEPS) -> list[list[Tensor]]:
        """As `train`; results are kept as NumPy arrays, which do not count against the budget."""
        seen = []
        optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9)
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = mean_square(self(batch(0)))
            loss.backward()
            seen.append([t.numpy().copy() for t in snapshot(self.module, loss)])
            optimizer.step()
        return [list(map(torch.from_numpy, arrays)) for arrays in seen]

    @property
    def engine(self) -> Any:
        return self.backend.engine

    @property
    def graph(self) -> Any:
        return self.engine.graphs[0]

    def report(self) -> Any:
        return reported(self.backend)


def reported(backend: Backend, *, bound: bool = False) -> Any:
    """The report, typed as Any: a missing figure fails the test anyway."""
    return backend.report(bound=bound)


def test_a_clock_that_is_set_back_gives_no_negative_times() -> None:
    assert WallClock().seconds(5, 3) == 0
    assert WallClock().seconds(0, 10**9) == 1


def slow_clock(backend: Any, factor: float = FACTOR) -> None:
    backend.engine.driver.clock = SlowClock(factor)


def nothing(_: Backend) -> None:
    pass


def test_slower_ops_give_one_plan_with_fewer_reruns(caplog: pytest.LogCaptureFixture) -> None:
    before = []

    def change(backend: Backend) -> None:
        before.append(reported(backend))
        slow_clock(backend)

    training = Training(change, link_limit=SLOW_LINK)
    with caplog.at_level(logging.INFO, logger="outcore"):
        seen = training.run(STEPS + WATCHED_STEPS)
    report = training.report()
    assert same(seen, small_reference(STEPS + WATCHED_STEPS))
    assert before[0].replans == 0
    assert before[0].counts.recompute > report.counts.recompute
    assert report.counts.offload > before[0].counts.offload
    assert report.replans == 1
    assert report.predicted_seconds > 10 * before[0].predicted_seconds
    (note,) = report.notes
    assert "planned again with measured times: another plan, predicted" in note
    assert f"over {WATCHED_STEPS} steps" in note
    assert "measured" in note.split("instead of")[1]
    assert [r.levelname for r in caplog.records if "planned again" in r.message] == ["INFO"]
    assert report.measured_peak_bytes is not None, "it is metered again"
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_link_that_gets_slower_is_used_no_more_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = small_reference(STEPS)
    before = []

    def change(backend: Backend) -> None:
        before.append((reported(backend), training.graph.planned))
        monkeypatch.setattr(Throttle, "moved", lambda _, nbytes: time.sleep(nbytes / 1e7))

    training = Training(change)
    seen = training.run()
    report, planned = training.report(), training.graph.planned
    assert same(seen, expected)
    assert report.replans == 1
    (told, earlier), problem = before[0], planned.problem
    # How much less depends on the times of this machine: little may have been offloaded before.
    assert told.offloaded_bytes >= report.offloaded_bytes
    still = simulate(problem, lower(problem, replace(earlier.plan, problem_digest=digest(problem))))
    assert planned.predicted.seconds <= still.seconds
    for way in ((Tier.DEVICE, Tier.DISK), (Tier.DISK, Tier.DEVICE)):
        rate = problem.hardware.link(*way).bytes_per_second
        assert rate < earlier.problem.hardware.link(*way).bytes_per_second
        assert rate < 1e7


def test_only_once() -> None:
    training = Training(slow_clock, link_limit=SLOW_LINK)
    training.run()
    planned, executable = training.graph.planned, training.graph.executable
    slow_clock(training.backend, FACTOR**2)
    training.run(3 * WATCHED_STEPS)
    assert training.graph.planned is planned
    assert training.graph.executable is executable
    report = training.report()
    assert report.replans == 1
    (note,) = report.notes
    assert note.endswith("this differs too, but outcore does not plan it again")


def test_where_all_is_kept_there_is_nothing_to_plan() -> None:
    training = Training(slow_clock, budget="1GiB")
    training.run()
    executable = training.graph.executable
    report = training.report()
    assert report.state == "in-core"
    assert report.replans == 0
    (note,) = report.notes
    assert note.startswith("measured")
    assert note.endswith("everything is kept, so there is nothing to plan again")
    training.run(WATCHED_STEPS)
    assert training.graph.executable is executable


def test_switched_off() -> None:
    expected = small_reference(STEPS)
    training = Training(slow_clock, drift="off")
    seen = training.run()
    report = training.report()
    assert same(seen, expected)
    assert report.replans == 0
    assert report.notes == ()
    assert report.measured_seconds > 10 * report.predicted_seconds


def test_within_the_margin_nothing_happens() -> None:
    training = Training(nothing, drift=1e9)
    training.run()
    assert training.report().replans == 0
    assert training.graph.execution.trial is None


@pytest.mark.parametrize("given", ["a lot", 0, -1.0, True])
def test_a_margin_that_is_none(given: Any) -> None:
    with pytest.raises(OptionValueError, match=r'drift=.*or "off"'):
        Backend(budget=TIGHT, drift=given)


@pytest.mark.parametrize("given", [1.5, 300, "0.5MiB/s"])
def test_a_rate_that_no_disk_has_is_a_mistake(given: Any) -> None:
    with pytest.raises(OptionValueError, match=r"bytes per second, and 1\.00 MiB/s is the least"):
        Backend(budget=TIGHT, link_limit=given)
    Backend(budget=TIGHT, link_limit="1MiB/s")


@pytest.mark.parametrize("given", [25, "25"])
def test_a_number_of_percent_is_a_mistake(given: Any) -> None:
    with pytest.raises(OptionValueError, match=r'it is 25 times .* for percent write "25%"'):
        Backend(budget=TIGHT, drift=given)
    Backend(budget=TIGHT, drift="25%")


def test_no_plan_is_made_while_a_call_waits_for_its_backward() -> None:
    training = Training(slow_clock)
    held = []

    def hold(backend: Backend) -> None:
        slow_clock(backend)
        held.append(training.call(batch(1)))

    training.change = hold
    training.run()
    assert training.graph.execution.trial is None
    assert training.report().replans == 0
    held.clear()
    gc.collect()
    training.run(2 * WATCHED_STEPS + TRIAL_STEPS)
    assert training.report().replans == 1


def test_a_call_that_waits_when_the_trial_is_done() -> None:
    training = Training(slow_clock)
    training.run(UNTIL_TRIAL + TRIAL_STEPS)
    trial = training.graph.execution.trial
    assert trial is not None
    assert trial.done
    planned, store = training.graph.planned, training.engine.stores
    stand_in = store.add(left_by_a_forward_call(training), follow=True)
    training.run(1)
    assert training.graph.planned is planned
    del stand_in
    training.run(1)
    assert training.graph.planned.replanned is not None


def left_by_a_forward_call(training: Training) -> Any:
    """A store of the graph, as a forward call leaves it."""
    visit = Visit(ref(training.graph), returns=training.engine.steps.returns)
    return Store(visit, training.graph.executable, EmptyLane(), [])


def test_a_trial_times_first_runs_and_reruns() -> None:
    training = Training(slow_clock, policy="recompute-all")
    training.run(UNTIL_TRIAL + TRIAL_STEPS)
    trial = training.graph.execution.trial
    assert trial is not None
    assert trial.done
    runs = [x.action for x in trial.planned.program.body if isinstance(x.action, Run)]
    again = {run.op for run in runs if run.again}
    assert again
    for run in runs:
        assert (len(trial.stopwatch.notes[run.op]) > TRIAL_STEPS) == (run.op in again)
    seconds = trial.problem().profile.seconds
    assert sum(seconds) > 10 * sum(trial.planned.problem.profile.seconds)


def test_copies_of_a_trial_are_recorded_and_no_others() -> None:
    training = Training(slow_clock, policy="swap-all")
    training.run(UNTIL_TRIAL)
    assert training.engine.driver.on_copy is None
    training.run(TRIAL_STEPS)
    training.engine.driver.drain()
    copies = list(training.graph.execution.trial.copies)
    assert {copy.direction for copy in copies} == {"out", "in"}
    assert all(isinstance(c, CopySpan) and c.stop_seconds > c.start_seconds for c in copies)
    training.run(1)
    assert training.engine.driver.on_copy is None


def test_each_graph_of_a_step_by_itself() -> None:
    steps = STEPS + 3 * WATCHED_STEPS
    training = Training(slow_clock, at=PLANNED + 3, budget="2.5MiB", link_limit=SLOW_LINK)
    torch.manual_seed(0)
    training.module = Broken()
    training.call = torch.compile(training.module, backend=training.backend)
    seen = training.run(steps)
    torch.manual_seed(0)
    plain = Broken()
    assert same(seen, train(plain, plain, [batch(0)], mean_square, steps))
    report = reported(training.backend, bound=True)
    assert report.graphs == 2
    assert report.replans == 2
    notes = [note.split(":")[0] for note in report.notes if "after backward" not in note]
    assert notes == ["graph 1", "graph 2"]
    assert report.measured_peak_bytes <= report.budget_bytes
    assert 0 < report.lower_bound_seconds <= report.predicted_seconds


def test_a_recompile_keeps_the_new_plan() -> None:
    training = Training(slow_clock, link_limit=SLOW_LINK)
    training.run()
    planned = training.graph.planned
    assert planned.replanned is not None
    torch._dynamo.reset()
    gc.collect()
    training.run(2 * WATCHED_STEPS + TRIAL_STEPS)
    assert training.graph.planned is planned
    assert training.report().replans == 1


def test_a_trial_ends_with_its_graph() -> None:
    training = Training(slow_clock)
    training.run(UNTIL_TRIAL + 1)
    driver = training.engine.driver
    assert training.graph.execution.trial is not None
    assert driver.on_copy is not None
    torch._dynamo.reset()
    gc.collect()
    training.run(1)
    assert driver.on_copy is None


def test_a_trial_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(slow_clock)
    training.run(UNTIL_TRIAL + 1)
    assert training.graph.execution.trial is not None
    monkeypatch.setattr(trials, "LONGEST_TRIAL", 4)
    for _ in range(6):
        training.call(batch(0))  # has no backward call
    assert training.graph.execution.trial is None
    assert training.engine.driver.on_copy is None
    monkeypatch.undo()
    training.run(2 * WATCHED_STEPS + TRIAL_STEPS)
    assert training.report().replans == 1


def test_the_plan_stays_where_no_other_is_faster() -> None:
    training = Training(nothing)
    training.run(PLANNED)
    graph, engine = training.graph, training.engine
    drift = Drift(1.0, 2.0, WATCHED_STEPS)
    problem = graph.planned.problem
    plans = engine.plans.planner.plan_again(
        engine.plans.planner.shares(graph, engine.registry.active()), graph.planned, problem, drift
    )
    (stays,) = plans
    assert stays.program is graph.planned.program
    assert stays.predicted == graph.planned.predicted
    assert not stays.replanned.changed


def test_the_plan_stays_where_the_better_one_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = small_reference(STEPS)
    refused: list[Any] = []

    def full(backend: Any) -> None:
        slow_clock(backend)
        reserve = backend.engine.driver.reserve

        def once(nbytes: Any) -> None:
            if not refused:
                refused.append(nbytes)
                raise SpillError(directory="/there", reason="full")
            reserve(nbytes)

        monkeypatch.setattr(backend.engine.driver, "reserve", once)

    training = Training(full, link_limit=SLOW_LINK)
    seen = training.run()
    assert refused
    report = training.report()
    assert same(seen, expected)
    assert report.replans == 1
    assert "the same plan" in report.notes[0]
    assert training.graph.planned.predicted.peak(Tier.DISK) <= refused[0][Tier.DISK]


@pytest.mark.parametrize("retain", [False, True])
def test_a_step_that_goes_back_twice_counts_once(retain: bool) -> None:
    training = Training(nothing)
    training.run(PLANNED)
    before = training.graph.status.times.steps
    loss = mean_square(training.call(batch(0)))
    if retain:
        loss.backward(retain_graph=True)
    loss.backward()
    assert training.graph.status.times.steps == before + 1
    assert all(len(work) == 2 for work in training.graph.status.times.recent)


class TickingDevice(LateDevice):
    """On any queue, `tick_seconds` pass from one event to the next."""

    tick_seconds = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.ticks: dict[int, int] = {}
        """Id of an event -> when it was last recorded; callers still hold the event."""
        self.now = 0

    def record(self, event: LateEvent, queue: str) -> None:
        super().record(event, queue)
        self.now += 1
        self.ticks[id(event)] = self.now

    def seconds(self, start: LateEvent, stop: LateEvent) -> float:
        return (self.ticks[id(stop)] - self.ticks[id(start)]) * self.tick_seconds


def test_on_a_device_with_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(backend: Any) -> None:
        backend.engine.driver.device.tick_seconds *= 1e6

    expected = small_reference(STEPS)
    gc.collect()
    monkeypatch.setattr(
        engines, "open_driver", lambda _, folder, __: QueuedDriver(TickingDevice(), folder)
    )
    # Beside the budget of the others: the host memory of this device counts as device memory.
    training = Training(
        change, budget="3MiB", policy="swap-all", host_budget="1MiB", spill_dir=tmp_path
    )
    assert same(training.run(), expected)
    report, hardware = training.report(), training.graph.planned.problem.hardware
    assert report.replans == 1
    probed = training.engine.plans.planner.solver.hardware()
    for way in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
        assert hardware.link(*way).seconds(1 << 17) > 1e3 * probed.link(*way).seconds(1 << 17)
    assert training.graph.planned.predicted.peak(Tier.DISK) > 0
    assert training.engine.driver.slabs.taken_bytes <= 1 << 20
    training.engine.driver.close()


# ---- the lower bound of the report --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["swap-all", "pooch", "keep-all"])
def test_the_bound_is_below_the_prediction(policy: str) -> None:
    budget = "1GiB" if policy == "keep-all" else TIGHT
    _, backend = small_planned(PLANNED, budget=budget, policy=policy)
    report = reported(backend, bound=True)
    assert 0 < report.lower_bound_seconds <= report.predicted_seconds
    assert report.lower_bound_seconds >= 0.99 * report.in_core_seconds


def test_the_bound_is_worked_out_only_if_asked_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(problem: Any) -> float:
        asked.append(problem)
        return 1e-9

    monkeypatch.setattr(summary, "lower_bound", counted)
    assert Backend(budget=TIGHT).report(bound=True).lower_bound_seconds is None
    _, backend = small_planned(PLANNED, budget=TIGHT, policy="swap-all")
    assert backend.report().lower_bound_seconds is None
    assert not asked
    assert backend.report(bound=True).lower_bound_seconds == 1e-9
    assert backend.report(bound=True).lower_bound_seconds == 1e-9
    assert backend.report().lower_bound_seconds is None
    assert len(asked) == 1


def test_the_bound_of_a_new_plan_is_worked_out_anew() -> None:
    training = Training(slow_clock, link_limit=SLOW_LINK)
    training.run(PLANNED)
    before = reported(training.backend, bound=True).lower_bound_seconds
    training.run(STEPS)
    after = reported(training.backend, bound=True)
    assert after.replans == 1
    assert before < after.lower_bound_seconds <= after.predicted_seconds


def test_without_scipy_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend = small_planned(PLANNED, budget=TIGHT, policy="swap-all")
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    report = backend.report(bound=True)
    assert report.lower_bound_seconds is None
    assert report.predicted_seconds is not None
    assert "scipy" in report.notes[0]
