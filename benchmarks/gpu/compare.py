"""Comparing ways to train one workload: each beside the same step in-core, turn by turn.

The step in-core, without a cap, stays in a process of its own as the reference. One after the
other, each way to train gets a fresh process and takes turns with it. Where both do not fit on the
device at once, the reference's own turns from before count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeAlias

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.trainer import Trainer, Turn
from benchmarks.gpu.training import Training, compared, judged, reported, timed
from benchmarks.gpu.workloads import Workload
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Mode
from benchmarks.kit.rounds import Turns, take_turns
from benchmarks.kit.rows import Check
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import InfeasibleError, OutcoreError
from outcore.units import format_bytes

CROWDED_SHARE = 0.9
"""The part of the device that the reference and another process may take at once."""
OUT_OF_MEMORY = "out of memory"
_KINDS = {"OutOfMemoryError": OUT_OF_MEMORY, "ImportError": "not installed"}
PATIENT = Patience()

Process: TypeAlias = Worker[Trainer]
Goals: TypeAlias = Callable[[Training], tuple[Check, ...]]


def _no_goals(_: Training) -> tuple[Check, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train, the most that it may take of the device (None: all), goals of its own."""

    mode: Mode
    cap_bytes: int | None = None
    goals: Goals = _no_goals


def compare(
    workload: Workload,
    in_core: Mode,
    contenders: Callable[[int], Sequence[Contender]],
    scale: Scale,
    patience: Patience,
) -> Iterator[Training]:
    """The row of the reference, then one for each of `contenders`, given the bytes that it takes.

    Rows that have not begun when `patience` is over are left out. What fails becomes a note.
    """
    if patience.over():
        return
    with Comparison(workload, in_core, scale) as comparison:
        yield comparison.reference
        if comparison.reference.note in {"", OUT_OF_MEMORY}:
            yield from comparison.rows(contenders(comparison.in_core_bytes), patience)


class Comparison:
    """A workload, and its step in-core: the process, its turns and its results.

    Where it does not fit on the device, there are no ratios and no results to compare with.
    """

    def __init__(self, workload: Workload, in_core: Mode, scale: Scale) -> None:
        self.workload, self.scale = workload, scale
        self.reference = Training(workload=workload.name, mode=in_core.name)
        self._processes = ExitStack()
        self._worker: Process | None = None
        self._turns: Turns[Turn] = ()
        self._results: dict[int, str] = {}
        try:
            worker = Worker(Trainer, workload, in_core, scale.device, None)
            self._worker = self._processes.enter_context(worker)
            self.reference = self._measure_reference(worker)
        except WorkerError as error:
            self.reference = replace(self.reference, note=_reason(error))
            self._leave()

    @property
    def in_core_bytes(self) -> int:
        """What the step takes in-core; 0 where that is not known."""
        return self.reference.allocated_bytes or 0

    def rows(self, contenders: Sequence[Contender], patience: Patience) -> Iterator[Training]:
        """One row each. The process of the next is started while one is measured."""
        with ThreadPoolExecutor(1) as pool:
            started: Future[Process] | None = None
            for number, contender in enumerate(contenders):
                if started is None:
                    if patience.over():
                        return
                    started = pool.submit(self._start, contender)
                current, started = started, None
                later = contenders[number + 1 : number + 2]
                try:
                    with current.result() as worker:
                        if later and not patience.over():
                            started = pool.submit(self._start, later[0])
                        yield self._row(contender, worker)
                except (WorkerError, OutcoreError) as error:
                    yield self._failed(contender, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _start(self, contender: Contender) -> Process:
        args = self.workload, contender.mode, self.scale.device, contender.cap_bytes
        return Worker(Trainer, *args)

    def _measure_reference(self, worker: Process) -> Training:
        scale, row = self.scale, self.reference
        first = worker.ask(Trainer.warm_up)[0]
        taken = take_turns({row.mode: worker}, Trainer.turn, scale.rounds, scale.steps, PATIENT)
        self._turns = taken[row.mode]
        self._results = _repeatable(worker)
        row = replace(row, first_step_seconds=first)
        return _weighed(timed(row, self.workload.batch, self._turns, self._turns), worker)

    def _row(self, contender: Contender, worker: Process) -> Training:
        row = self._blank(contender)
        self._make_room(contender)
        first = worker.ask(Trainer.warm_up)[0]
        turns, reference = self._take_turns(contender, worker)
        if not turns:
            return replace(row, note="failed in a turn")
        row = timed(replace(row, first_step_seconds=first), self.workload.batch, turns, reference)
        row = self._compared(row, worker)
        row = judged(reported(_weighed(row, worker), worker.ask(Trainer.report)))
        return replace(row, checks=(*contender.goals(row), *row.checks))

    def _compared(self, row: Training, worker: Process) -> Training:
        """The row with the results that differ from eager's; if any do, from `aot_eager`'s.

        torch's own tracing changes some (which kernels run under autocast, say).
        """
        mine = worker.ask(Trainer.results)
        found = compared(row, self._results, mine)
        if not found.unlike or self._worker is None:
            return found
        traced = compared(row, _repeatable(self._worker, Trainer.traced_results), mine)
        return replace(traced, note=f"{found.unlike} of {found.compared} unlike eager")

    def _take_turns(self, contender: Contender, worker: Process) -> tuple[Turns[Turn], Turns[Turn]]:
        """Those of the contender (empty: it failed in one), and of the reference."""
        mine, its = contender.mode.name, f"{self.reference.mode} in-core"
        reference = {} if self._worker is None else {its: self._worker}
        scale = self.scale
        taken = take_turns(
            reference | {mine: worker}, Trainer.turn, scale.rounds, scale.steps, PATIENT
        )
        return taken.get(mine, ()), taken.get(its, self._turns)

    def _make_room(self, contender: Contender) -> None:
        """End the reference's process where another one would not fit beside it, for good."""
        if self._worker is None:
            return
        total = self._worker.ask(Trainer.total_bytes)
        taken = self.reference.reserved_bytes or 0
        if total is not None and taken + (contender.cap_bytes or taken) > CROWDED_SHARE * total:
            self._leave()

    def _blank(self, contender: Contender) -> Training:
        name, mode = self.workload.name, contender.mode.name
        return Training(workload=name, mode=mode, cap_bytes=contender.cap_bytes)

    def _failed(self, contender: Contender, error: WorkerError | OutcoreError) -> Training:
        return replace(self._blank(contender), note=_reason(error))

    def _leave(self) -> None:
        self._worker = None
        self._processes.close()


def _repeatable(
    worker: Process, results: Callable[[Trainer], tuple[str, ...]] = Trainer.results
) -> dict[int, str]:
    """Digests of the results that come out the same twice."""
    first, second = (worker.ask(results) for _ in range(2))
    pairs = enumerate(zip(first, second, strict=True))
    return {number: one for number, (one, other) in pairs if one == other}


def _weighed(row: Training, worker: Process) -> Training:
    """The row with the peak by the meter, where the device does not count."""
    if row.allocated_bytes is not None:
        return row
    return replace(row, allocated_bytes=worker.ask(Trainer.metered_bytes))


def _reason(error: WorkerError | OutcoreError) -> str:
    if isinstance(error, InfeasibleError):
        return f"infeasible: needs {format_bytes(error.floor_bytes)}"
    if isinstance(error, WorkerError) and error.kind in _KINDS:
        return _KINDS[error.kind]
    print(error, file=sys.stderr)
    return f"failed: {error.kind if isinstance(error, WorkerError) else type(error).__name__}"
