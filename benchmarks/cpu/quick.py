"""quick: measure how long it takes from the first call to a plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import EVERY_POLICY, Outcore
from benchmarks.kit.rows import Check, Row
from benchmarks.kit.worker import Worker
from outcore.errors import InfeasibleError
from outcore.lower import lower
from outcore.policies import resolve
from outcore.runtime.settings.options import DEFAULT_POLICY
from outcore.simulate import simulate
from outcore.units import format_bytes, format_seconds

LIMIT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickness(Row):
    """The planning of one policy."""

    policy: str
    planning_seconds: float | None = None
    """Time of policy, lowering, verification and simulation."""
    capture_seconds: float | None = None
    """outcore's part of the first step."""
    first_step_seconds: float | None = None
    """The first step, including the work of Dynamo and AOTAutograd."""
    steady_step_seconds: float | None = None


def quick(scale: Scale, patience: Patience) -> Iterator[Row]:
    """The default policy while training, a few times; then all policies on the same problem."""
    if patience.over():
        return
    budget = int(in_core_peak_bytes(scale.workload) * scale.budget_share)
    mode = Outcore(DEFAULT_POLICY, budget)
    for number in range(scale.repeats):
        if patience.over():
            return
        with Worker(alone, scale.workload, mode) as worker:
            yield _in_training(worker)
            if number == scale.repeats - 1:
                for policy in EVERY_POLICY:
                    yield worker.ask(planning, policy)


def _in_training(worker: Worker[Trainer]) -> Quickness:
    steps = worker.ask(Trainer.warm_up)
    steady, _ = worker.ask(Trainer.seconds, 0.0, 3)
    report = worker.ask(Trainer.report)
    seconds = report["planning_seconds"]
    goal = f"plans in {format_seconds(seconds)}, below {format_seconds(LIMIT_SECONDS)}"
    return Quickness(
        policy=f"{DEFAULT_POLICY}, in training",
        planning_seconds=seconds,
        capture_seconds=report["capture_seconds"],
        first_step_seconds=steps[0],
        steady_step_seconds=steady,
        checks=(Check(goal, seconds < LIMIT_SECONDS),),
    )


def planning(trainer: Trainer, policy: str) -> Quickness:
    """Plan the problem of `trainer`'s first graph again, by `policy`."""
    backend = trainer.backend
    assert backend is not None and backend.engine is not None  # noqa: PT018 - one fact
    planned = backend.engine.graphs[0].planned
    assert planned is not None  # it trains
    start = time.perf_counter()
    try:
        plan = resolve(policy).plan(planned.problem)
    except InfeasibleError as error:
        seconds = time.perf_counter() - start
        note = f"infeasible: needs {format_bytes(error.floor_bytes)}"
        return Quickness(policy=policy, planning_seconds=seconds, note=note)
    simulate(planned.problem, lower(planned.problem, plan))
    return Quickness(policy=policy, planning_seconds=time.perf_counter() - start)
