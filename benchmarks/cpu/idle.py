"""idle: measure what outcore costs if everything fits and nothing is moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.cpu.workloads import case_names
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import AotEager, Eager, Outcore
from benchmarks.kit.rounds import (
    Turn,
    Turns,
    median_of_ratios,
    seconds,
    spread,
    steps_per_turn,
    take_turns,
)
from benchmarks.kit.rows import Row, at_most
from benchmarks.kit.worker import Worker

LIMIT = 1.02
"""The largest time of a step relative to `aot_eager`'s."""
FRESH = 3
"""Number of processes of each mode, one after the other: they differ more than their turns do."""
MODES = (AotEager(), Eager(), Outcore("keep-all"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness(Row):
    """One model. Ratios are medians over the rounds; `quartiles` belong to `of_aot_eager_ratio`."""

    workload: str
    rounds: int
    eager_seconds: float
    aot_eager_seconds: float
    outcore_seconds: float
    of_aot_eager_ratio: float
    quartiles: str
    of_eager_ratio: float


def idle(scale: Scale, patience: Patience) -> Iterator[Row]:
    """A row for each network of the benchmarks and each model of the tests."""
    for workload in (*scale.idle_workloads, *(scale.cases or case_names())):
        if patience.over():
            return
        yield _row(workload, scale, patience)


def _row(workload: str, scale: Scale, patience: Patience) -> Idleness:
    rounds = -(-scale.rounds // FRESH)
    sets = [_turns(workload, scale, rounds, patience) for _ in range(FRESH)]
    aot_eager, eager, outcore = (tuple(chain(*each)) for each in zip(*sets, strict=True))
    ratio = median_of_ratios(outcore, aot_eager)
    return Idleness(
        workload=workload,
        rounds=len(outcore),
        eager_seconds=seconds(eager),
        aot_eager_seconds=seconds(aot_eager),
        outcore_seconds=seconds(outcore),
        of_aot_eager_ratio=ratio,
        quartiles=spread(outcore, aot_eager),
        of_eager_ratio=median_of_ratios(outcore, eager),
        checks=at_most("of aot_eager", ratio, LIMIT),
    )


def _turns(workload: str, scale: Scale, rounds: int, patience: Patience) -> tuple[Turns[Turn], ...]:
    """The turns of fresh processes, one process for each of `MODES`."""
    with ExitStack() as stack:
        workers = {m.name: stack.enter_context(Worker(alone, workload, m)) for m in MODES}
        warm = [worker.ask(Trainer.warm_up)[-1] for worker in workers.values()]
        steps = steps_per_turn(warm[0], scale.turn_seconds)
        return tuple(take_turns(workers, Trainer.turn, rounds, steps, patience).values())
