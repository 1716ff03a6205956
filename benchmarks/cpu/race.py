"""race: train one workload in several ways, in turns, each in a separate process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, Turn, alone
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Eager, Mode
from benchmarks.kit.rounds import Turns, ratio_of_medians, seconds, spread, take_turns
from benchmarks.kit.rows import Check, Row, at_most, ratio
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import InfeasibleError
from outcore.units import format_bytes

INFEASIBLE = "infeasible"
"""The beginning of the note of a way to train that has no plan."""

RESIDENT_LIMIT = 1.10
"""The most that the process may grow, relative to the peak of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner(Row):
    """One way to train."""

    workload: str
    mode: str
    link: str
    """The limit on the link's rate, or `disk` for full speed."""
    turns: int | None = None
    step_seconds: float | None = None
    """Median over the turns."""
    of_eager_ratio: float | None = None
    """Ratio of the medians."""
    quartiles: str | None = None
    """Quartiles of the ratio to eager within a round."""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    of_eager_peak_ratio: float | None = None
    resident_bytes: int | None = None
    """High-water mark of the process's resident memory, above what it held at its start."""
    resident_of_peak_ratio: float | None = None
    predicted_seconds: float | None = None
    keep_offload_recompute: str | None = None
    offloaded_bytes: int | None = None
    recompute_seconds: float | None = None


R = TypeVar("R", bound=Runner)


class Raced(NamedTuple):
    """What one way to train took, in one process or in several, one after the other."""

    turns: Turns[Turn]
    peak_bytes: int
    report: dict[str, Any]


def race(
    scale: Scale, modes: Sequence[Mode], link: str | None, patience: Patience
) -> Iterator[Runner]:
    """A row for each mode, over a link that is limited to `link`. Eager must be among the modes."""
    raced = run(scale.workload, modes, scale.rounds, patience)
    for mode in modes:
        runner = Runner(workload=scale.workload, mode=mode.name, link=link or "disk")
        yield scored(runner, raced[mode.name], raced)


def run(
    workload: str, modes: Sequence[Mode], rounds: int, patience: Patience
) -> dict[str, Raced | str]:
    """Run all modes in turns. Returns the figures by name, or the reason if a mode failed."""
    found: dict[str, Raced | str] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker[Trainer]] = {}
        for mode in modes:
            try:
                workers[mode.name] = _ready(stack, workload, mode)
            except (InfeasibleError, WorkerError) as error:
                found[mode.name] = reason(error)
        turns = take_turns(workers, Trainer.turn, rounds, 1, patience)
        for name, worker in workers.items():
            if name not in turns:
                found[name] = "failed in a turn"
                continue
            peak, report = worker.ask(Trainer.peak_bytes), worker.ask(Trainer.report)
            found[name] = Raced(turns[name], peak, report)
    return found


def scored(row: R, result: Raced | str, results: Mapping[str, Raced | str]) -> R:
    """The row with the figures of its `result`, compared with those of eager in `results`."""
    eager = results[Eager().name]
    if isinstance(result, str) or isinstance(eager, str):
        return replace(row, note=result if isinstance(result, str) else f"eager {eager}")
    timed = _timed(row, result.turns, eager.turns)
    return _judged(_weighed(timed, result.report, result.peak_bytes, eager.peak_bytes))


def _ready(stack: ExitStack, workload: str, mode: Mode) -> Worker[Trainer]:
    worker = Worker(alone, workload, mode)
    try:
        worker.ask(Trainer.warm_up)
    except BaseException:
        worker.close()
        raise
    return stack.enter_context(worker)


def reason(error: InfeasibleError | WorkerError) -> str:
    """Why there are no figures, for a row's note. What a worker printed goes to the terminal."""
    if isinstance(error, InfeasibleError):
        return f"{INFEASIBLE}: needs {format_bytes(error.floor_bytes)}"
    print(error, file=sys.stderr)
    return f"failed: {error.kind}"


def _timed(row: R, turns: Turns[Turn], eager: Turns[Turn]) -> R:
    taken = [turn for turn in turns if turn is not None]
    return replace(
        row,
        turns=len(taken),
        step_seconds=seconds(turns),
        of_eager_ratio=ratio_of_medians(turns, eager),
        quartiles=spread(turns, eager),
        resident_bytes=max(turn.resident_bytes for turn in taken),
    )


def _weighed(row: R, report: dict[str, Any], peak: int, eager_peak: int) -> R:
    row = replace(
        row,
        peak_bytes=peak,
        of_eager_peak_ratio=peak / eager_peak,
        resident_of_peak_ratio=ratio(row.resident_bytes, peak),
    )
    if not report:
        return row
    return replace(
        row,
        budget_bytes=report["budget_bytes"],
        predicted_peak_bytes=report["predicted_peak_bytes"],
        predicted_seconds=report["predicted_seconds"],
        keep_offload_recompute="/".join(str(n) for n in report["counts"].values()),
        offloaded_bytes=report["offloaded_bytes"],
        recompute_seconds=report["recompute_seconds"],
    )


def _judged(row: R) -> R:
    """The row with the checks of outcore's modes."""
    if row.budget_bytes is None or row.peak_bytes is None:
        return row
    checks = (
        Check("inside the budget", row.peak_bytes <= row.budget_bytes),
        *at_most("resident of peak", row.resident_of_peak_ratio, RESIDENT_LIMIT),
    )
    return replace(row, checks=checks)
