"""beyond: train a step that needs more memory than the machine has, within half of it.

The batch is so large that the step, with everything kept, needs more than the machine's memory.
Plain PyTorch may use what is free, and fails; outcore trains.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.cpu import memory
from benchmarks.cpu.race import reason
from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.cpu.worth import TIME_LIMIT
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Eager, Outcore
from benchmarks.kit.rows import Check, Row, at_most, ratio
from benchmarks.kit.worker import Worker, WorkerError
from outcore.capture import trace_network
from outcore.compare import Comparison
from outcore.errors import InfeasibleError
from outcore.networks import network
from outcore.presets import preset
from outcore.runtime.limits.host import available_bytes, memory_limit_bytes
from outcore.runtime.settings.options import DEFAULT_POLICY
from outcore.units import format_bytes

NETWORK, SIZE = "densenet121", 224
"""Every layer keeps what it makes: there are few operations for each byte."""
MEMORY_RATIO = 1.4
"""In-core memory of the step, relative to the machine's memory."""
BUDGET_SHARE = 0.5
"""The budget, as a fraction of the machine's memory."""
RESIDENT_LIMIT = 1.10
OUT_OF_MEMORY, KILLED = "can't allocate memory", "Died"
"""What torch's error says, and the worker error for a process that the system killed."""
TURNS = 3
COUNTED_BY = "v100-pcie3"
"""Any machine would do: only bytes are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond(Row):
    """One way to train. In-core figures are predicted, from the profile of the step as it ran."""

    mode: str
    batch: int
    memory_bytes: int
    """The machine's memory."""
    in_core_peak_bytes: int
    budget_bytes: int | None = None
    measured_peak_bytes: int | None = None
    resident_bytes: int | None = None
    in_core_seconds: float | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    of_in_core_ratio: float | None = None


def beyond(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Plain PyTorch with the free memory, then outcore with half of the machine's memory."""
    if patience.over():
        return
    there = scale.memory_bytes or memory_limit_bytes()
    batch = _batch(int(MEMORY_RATIO * there))
    workload = f"{NETWORK}-b{batch}-{SIZE}"
    row = Beyond(
        mode=Eager().name,
        batch=batch,
        memory_bytes=there,
        in_core_peak_bytes=_in_core_bytes(batch),
    )
    yield _plain(row, workload, scale.memory_bytes or available_bytes())
    if not patience.over():
        yield _planned(row, workload, Outcore(DEFAULT_POLICY, int(BUDGET_SHARE * there)))


def _in_core_bytes(batch: int) -> int:
    trace = trace_network(network(NETWORK), batch)
    return Comparison(trace, preset(COUNTED_BY), batch).in_core_peak_bytes


def _batch(nbytes: int) -> int:
    """The smallest batch that needs `nbytes`: every sample needs the same amount."""
    one, two = _in_core_bytes(1), _in_core_bytes(2)
    return max(1, 1 - (one - nbytes) // (two - one))


def limit(_: Trainer, nbytes: int) -> None:
    """Limit the process to `nbytes` more address space than it has mapped."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory.mapped_bytes() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _plain(row: Beyond, workload: str, free_bytes: int) -> Beyond:
    try:
        with Worker(alone, workload, Eager()) as worker:
            worker.ask(limit, free_bytes)
            seconds = worker.ask(Trainer.train)
    except WorkerError as error:
        out = error.kind == KILLED or OUT_OF_MEMORY in error.details
        note = f"failed with {format_bytes(free_bytes)}: {'out of memory' if out else error.kind}"
        return replace(row, note=note, checks=(Check("it does not fit", met=out),))
    return replace(row, measured_seconds=seconds, checks=(Check("it does not fit", met=False),))


def _planned(row: Beyond, workload: str, mode: Outcore) -> Beyond:
    row = replace(row, mode=mode.name)
    try:
        with Worker(alone, workload, mode) as worker:
            worker.ask(Trainer.warm_up)
            turns = [worker.ask(Trainer.turn) for _ in range(TURNS)]
            peak = worker.ask(Trainer.peak_bytes)
            report = worker.ask(Trainer.report)
    except (InfeasibleError, WorkerError) as error:
        print(error, file=sys.stderr)
        return replace(row, note=reason(error))
    if report["predicted_peak_bytes"] is None:
        return replace(row, note=f"not planned: {report['state']}")
    seconds, resident = median(t.seconds for t in turns), max(t.resident_bytes for t in turns)
    budget, in_core = int(mode.budget), report["in_core_peak_bytes"]
    slowdown = ratio(seconds, report["in_core_seconds"])
    return replace(
        row,
        in_core_peak_bytes=in_core,
        budget_bytes=budget,
        measured_peak_bytes=peak,
        resident_bytes=resident,
        in_core_seconds=report["in_core_seconds"],
        predicted_seconds=report["predicted_seconds"],
        measured_seconds=seconds,
        of_in_core_ratio=slowdown,
        checks=(
            Check("in-core it would take more than there is", in_core > row.memory_bytes),
            Check("inside the budget", peak <= report["predicted_peak_bytes"] <= budget),
            *at_most("resident of budget", ratio(resident, budget), RESIDENT_LIMIT),
            *at_most("time of in-core, predicted", slowdown, TIME_LIMIT),
        ),
    )
