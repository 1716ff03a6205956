"""compare: train one workload in several ways, each in turns with the same step in-core.

The in-core step, without a cap, stays in a separate process as the reference. Each way to train
then gets a fresh process, one after the other, and takes turns with the reference. If both do not
fit on the device at once, the reference's own earlier turns are used.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from benchmarks.gpu.kept import keep, keeps
from benchmarks.gpu.machine import planner_compiled
from benchmarks.gpu.processes import Process, await_spare, trainer
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.trainer import Results, Trainer, Turn
from benchmarks.gpu.training import (
    FAILED,
    TOO_LONG,
    Training,
    compared,
    judged,
    key,
    near,
    recorded,
    reported,
    timed,
)
from benchmarks.gpu.workloads import Workload
from benchmarks.kit import worker
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Mode, Outcore
from benchmarks.kit.results import saved
from benchmarks.kit.rounds import FEWEST_ROUNDS, Turns, take_turns
from benchmarks.kit.rows import Check
from benchmarks.kit.worker import WorkerError
from outcore.errors import InfeasibleError, OutcoreError
from outcore.units import format_bytes

CROWDED_SHARE = 0.9
"""The fraction of the device that the reference and another process may use together."""
OUT_OF_MEMORY = "out of memory"
FEWEST_STEPS = 2
"""Steps in each turn of the reference alone."""
SAMPLES = 3
"""Steps of which results must agree to be compared with: atomics may agree by chance."""
_KINDS = {
    worker.OUT_OF_MEMORY: OUT_OF_MEMORY,
    "ImportError": "not installed",
    "Timeout": TOO_LONG,
}

Goals: TypeAlias = Callable[[Training], tuple[Check, ...]]


def no_goals(_: Training) -> tuple[Check, ...]:
    """No checks."""
    return ()


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train, the most device bytes that it may use (None: all), and its own goals."""

    mode: Mode
    cap_bytes: int | None = None
    goals: Goals = no_goals
    offloads_state: bool = False
    """Whether the optimizer's state is in host memory between its steps."""

    @property
    def name(self) -> str:
        """The name in tables."""
        return self.mode.name + ", state offloaded" * self.offloads_state


def compare(
    workload: Workload,
    in_core: Mode,
    contenders: Callable[[int], Sequence[Contender]],
    scale: Scale,
    patience: Patience,
) -> Iterator[Training]:
    """The row of the reference, then a row for each of `contenders`, which gets its peak bytes.

    Rows of an earlier run are left out, and so is the reference if all of them are known. Rows that
    have not begun when `patience` is over are left out. A failure becomes a note.
    """
    if patience.over():
        return
    comparison = Comparison(workload, in_core, scale, patience)
    if comparison.is_known(contenders):
        return
    try:
        reference = comparison.begin()
        yield reference
        if reference.step_seconds is not None or reference.note == OUT_OF_MEMORY:
            found = contenders(reference.allocated_bytes or 0)
            yield from comparison.rows([c for c in found if not comparison.knows(c)])
    finally:
        comparison.end()


class Comparison:
    """A workload, and its in-core step: the process, its turns and its results.

    If that step does not fit on the device, there are no ratios and no results to compare with.
    """

    def __init__(self, workload: Workload, in_core: Mode, scale: Scale, patience: Patience) -> None:
        self.workload, self.in_core, self.scale, self.patience = workload, in_core, scale, patience
        self._process: Process | None = None
        self._turns: Turns[Turn] = ()
        self._results: dict[int, str] = {}
        self._all: Results = ()
        """All results of the reference, also those that vary."""
        self._traced: dict[int, str] | None = None
        """Results of the traced graph, once they were needed."""
        self._left: Sequence[Contender] = ()
        """Those whose rows are still to come, the current one included."""

    def begin(self) -> Training:
        """Start the reference, and measure it alone."""
        row = Training(workload=self.workload.name, mode=self.in_core.name)
        try:
            self._process = process = self._started(Contender(self.in_core))
            first = process.ask(Trainer.warm_up)[0]
            few = self.workload.lengths or min(self.scale.steps, FEWEST_STEPS)
            turns = {row.mode: process}
            self._turns = self._take_turns(turns, FEWEST_ROUNDS, steps=few)[row.mode]
            row = timed(row, self.workload.batch, self._turns, self._turns)
            row = _weighed(replace(row, first_step_seconds=first), process)
        except WorkerError as error:
            self.end()
            return replace(row, note=reason(error))
        try:
            self._all = process.ask(Trainer.results)
            known = [result.digest for result in self._all]
            self._results = _repeatable(process, Trainer.digests, known)
        except WorkerError as error:
            self._lost(error)
            row = replace(row, note=reason(error))
        return row

    def knows(self, contender: Contender) -> bool:
        """Whether the row is known from an earlier run."""
        return key(saved(self._blank(contender))) in self.patience.known

    def is_known(self, contenders: Callable[[int], Sequence[Contender]]) -> bool:
        """Whether all rows are known from an earlier run."""
        reference = self.patience.known.get(key(saved(self._blank(Contender(self.in_core)))))
        if reference is None:
            return False
        return all(map(self.knows, contenders(reference.get("allocated_bytes", 0))))

    def rows(self, contenders: Sequence[Contender]) -> Iterator[Training]:
        """One row each.

        The first one is measured in any case, until there is no time left at all.
        """
        planner_compiled()
        for number, contender in enumerate(contenders):
            self._left = contenders[number:]
            if number and self.patience.over():  # a reference alone says nothing
                break
            try:
                with self._started(contender) as process:
                    row = self._row(contender, process)
            except Exception as error:  # noqa: BLE001 - the other rows should still run
                row = replace(self._blank(contender), note=reason(error))
            yield row

    def end(self) -> None:
        """End the reference's process. Calling this more than once is fine."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _started(self, contender: Contender) -> Process:
        return trainer(
            self.patience,
            self.workload,
            contender.mode,
            self.scale.device,
            contender.cap_bytes,
            offloads_state=contender.offloads_state,
        )

    def _row(self, contender: Contender, process: Process) -> Training:
        row = self._blank(contender)
        self._make_room(contender)
        first = process.ask(Trainer.warm_up)[0]
        row = replace(row, refused_before=process.ask(Trainer.refused))
        turns, reference = self._turns_of(row.mode, process)
        row = timed(replace(row, first_step_seconds=first), self.workload.batch, turns, reference)
        fused = isinstance(contender.mode, Outcore) and not _is_exact(contender)
        more: tuple[Callable[[Training], Training], ...] = (
            lambda row: _weighed(row, process),
            lambda row: reported(row, process.ask(Trainer.report)),
            lambda row: recorded(row, process.ask(Trainer.recorded)),
            lambda row: _kept(row, process),
            lambda row: self._compared(row, process.ask(Trainer.results), fused=fused),
        )
        for add in more:  # none takes the figures of the others with it
            try:
                row = add(row)
            except Exception as error:  # noqa: BLE001 - as above
                row = replace(row, note="; ".join(filter(None, [row.note, reason(error)])))
        row = judged(row)
        return replace(row, checks=(*contender.goals(row), *row.checks))

    def _turns_of(self, name: str, process: Process) -> tuple[Turns[Turn], Turns[Turn]]:
        """The turns of `process` and of the reference, a pair for each round.

        Raises WorkerError if `process` fails in a round.
        """
        if self._process is not None:
            reference = f"{self.in_core.name} in-core"
            processes, failed = {reference: self._process, name: process}, dict[str, WorkerError]()
            try:
                taken = self._take_turns(processes, self.scale.rounds, failed)
            except WorkerError as error:
                self._lost(error)
            else:
                if name in failed:
                    raise failed[name]
                return taken[name], taken[reference]
        return self._take_turns({name: process}, FEWEST_ROUNDS)[name], self._turns

    def _lost(self, error: WorkerError) -> None:
        """Continue without the reference, whose process failed."""
        print(f"the reference failed: {error}", file=sys.stderr)
        self.end()

    def _take_turns(
        self,
        processes: dict[str, Process],
        rounds: int,
        failed: dict[str, WorkerError] | None = None,
        steps: int | None = None,
    ) -> dict[str, Turns[Turn]]:
        await_spare(self.patience)
        steps = steps or self.scale.steps
        return take_turns(processes, Trainer.turn, rounds, steps, self.patience, failed)

    def _compared(self, row: Training, mine: Results, *, fused: bool) -> Training:
        """The row with the number of results that differ from eager's.

        Fused kernels round otherwise: their results are near eager's at best. If others differ, the
        row compares with the traced graph's results instead: torch's own tracing changes some
        results (for example which kernels run under autocast).
        """
        row = near(row, self._all, mine)
        found = row if fused else compared(row, self._results, mine)
        if not found.unlike:
            return found
        note = f"{found.unlike} of {found.compared} unlike {self.in_core.name}"
        self._trace()
        if self._traced is None:  # it is not known whether torch's tracing is the cause
            return replace(row, note=note)
        return replace(compared(row, self._traced, mine), note=note)

    def _trace(self) -> None:
        """Get the results of the traced graph from the reference's process, while there is one."""
        if self._traced is not None or self._process is None:
            return
        try:
            self._traced = _repeatable(self._process, Trainer.traced_digests)
            self._process.ask(Trainer.settle)
        except WorkerError as error:
            self._lost(error)

    def _make_room(self, contender: Contender) -> None:
        """End the reference's process for good, if another one would not fit next to it."""
        if self._process is None:
            return
        try:
            memory = self._process.ask(Trainer.memory)
        except WorkerError as error:
            self._lost(error)
            return
        if memory is None:
            return
        taken = memory.reserved_bytes
        if taken + _most_bytes(contender, taken) > CROWDED_SHARE * memory.total_bytes:
            if self._results and any(map(_is_exact, self._left)):
                self._trace()
            self.end()

    def _blank(self, contender: Contender) -> Training:
        name, mode = self.workload.name, contender.name
        return Training(workload=name, mode=mode, cap_bytes=contender.cap_bytes)


def _is_exact(contender: Contender) -> bool:
    """Whether it is outcore with torch's own kernels, whose results are those of the graph."""
    return isinstance(contender.mode, Outcore) and not contender.mode.fuse


def _most_bytes(contender: Contender, in_core_bytes: int) -> int:
    """The most it may use: without a cap, 1.5 times its budget, since the allocator needs more."""
    budget = contender.mode.budget if isinstance(contender.mode, Outcore) else None
    most = budget * 3 // 2 if isinstance(budget, int) else in_core_bytes
    return contender.cap_bytes or min(most, in_core_bytes)


def reason(error: Exception) -> str:
    """Why there are no figures, for a note. What may be unexpected is also printed in full."""
    if isinstance(error, InfeasibleError):
        needed = format_bytes(error.floor_bytes)
        return f"infeasible: needs {needed} of {error.tier} memory for {error.op}"
    if isinstance(error, WorkerError) and error.kind in _KINDS:
        if error.kind == worker.OUT_OF_MEMORY:
            print(error, file=sys.stderr)  # where, and how much was there
        return _KINDS[error.kind]
    if isinstance(error, WorkerError | OutcoreError):
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)
    return f"{FAILED}: {error.kind if isinstance(error, WorkerError) else type(error).__name__}"


def _repeatable(
    process: Process,
    digests: Callable[[Trainer], tuple[str, ...]],
    known: Sequence[str] | None = None,
) -> dict[int, str]:
    """Digests by number of the results that are the same in each of `SAMPLES` steps.

    `known`: those of the first step, if it was run before.
    """
    first = known or process.ask(digests)
    others = [process.ask(digests) for _ in range(SAMPLES - 1)]
    return {i: each for i, each in enumerate(first) if all(other[i] == each for other in others)}


def _kept(row: Training, process: Process) -> Training:
    """The row, whose files are kept if any are."""
    if keeps():
        cap = "" if row.cap_bytes is None else f" {format_bytes(row.cap_bytes)}"
        keep(f"{row.workload} {row.mode}{cap}", process.ask(Trainer.files))
    return row


def _weighed(row: Training, process: Process) -> Training:
    """The row with the metered peak, if the device does not count memory."""
    if row.allocated_bytes is not None:
        return row
    return replace(row, allocated_bytes=process.ask(Trainer.metered_bytes))
