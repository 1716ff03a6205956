"""leak: check that memory stays flat over many steps, also if backward never runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import linear_regression

import torch

from benchmarks.cpu import memory
from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Eager, Mode, Outcore
from benchmarks.kit.rows import Check, Row
from benchmarks.kit.worker import Worker
from outcore.measure import resident_bytes
from outcore.runtime.settings.options import DEFAULT_POLICY

WORKLOAD = "small-resnet-b16-64"
BUDGET_SHARE = 0.7
FLAT_SHARE = 0.02
"""How much resident memory may grow over the second half, relatively: malloc fluctuates."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds after a step."""

    resident_bytes: int
    tensor_bytes: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leakage(Row):
    """One way to spend steps. Growth and slopes are over the second half of the steps."""

    what: str
    mode: str
    steps: int
    resident_bytes: int
    resident_growth_bytes: int
    resident_per_step_bytes: float
    tensor_bytes: int
    tensor_growth_bytes: int
    open_files_growth: int


def leak(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Training, then forward calls whose results are dropped; eager's figures for comparison."""
    if patience.over():
        return
    budget = int(in_core_peak_bytes(WORKLOAD) * BUDGET_SHARE)
    modes: tuple[Mode, ...] = (Outcore(DEFAULT_POLICY, budget), Eager())
    for mode in modes:
        if patience.over():
            return
        with Worker(alone, WORKLOAD, mode) as worker:
            worker.ask(Trainer.warm_up)
            trained = worker.ask(train, scale.steps)
            dropped = worker.ask(drop, scale.drops)
        row = partial(_row, mode)
        yield row("training", trained)
        yield row("forward, result dropped", dropped)


def train(trainer: Trainer, steps: int) -> tuple[Sample, ...]:
    """Train, and sample the process after each step."""
    samples = []
    for _ in range(steps):
        trainer.train()
        samples.append(_sample())
    return tuple(samples)


def drop(trainer: Trainer, steps: int) -> tuple[Sample, ...]:
    """Call forward, drop the result, and sample the process after each call."""
    samples = []
    for _ in range(steps):
        trainer.call(*trainer.args)
        samples.append(_sample())
    return tuple(samples)


def _sample() -> Sample:
    tensors = resident_bytes(torch.device("cpu"))
    return Sample(memory.resident_bytes(), tensors, _open_files())


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _row(mode: Mode, what: str, samples: tuple[Sample, ...]) -> Leakage:
    half = samples[len(samples) // 2 :]
    first, last = half[0], half[-1]
    slope = linear_regression(range(len(half)), [s.resident_bytes for s in half]).slope
    tensors = last.tensor_bytes - first.tensor_bytes
    drift = slope * len(half) / last.resident_bytes
    checks = (
        Check(f"resident memory flat: {drift:+.2%}", drift <= FLAT_SHARE),
        Check("tensor bytes flat", tensors <= 0),
    )
    return Leakage(
        what=what,
        mode=mode.name,
        steps=len(samples),
        resident_bytes=last.resident_bytes,
        resident_growth_bytes=last.resident_bytes - first.resident_bytes,
        resident_per_step_bytes=slope,
        tensor_bytes=last.tensor_bytes,
        tensor_growth_bytes=tensors,
        open_files_growth=last.files - first.files,
        checks=checks if isinstance(mode, Outcore) else (),
    )
