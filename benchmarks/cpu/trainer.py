"""Trainer: one model trained in one way, step by step, with the instruments to observe it."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cpu import memory
from benchmarks.cpu.workloads import make_step
from benchmarks.kit.digests import digests
from benchmarks.kit.modes import Checkpoint, Eager, Mode, Outcore
from outcore.execute.malloc import own_malloc
from outcore.ir.problem import Problem
from outcore.measure import metered, resident_bytes

FEWEST_WARM_UPS, MOST_WARM_UPS = 3, 12
LAST_WARM_UPS = 2
"""Steps of outcore that end the warm-up. Reading a report ends the metering of its step before the
optimizer runs. So the next step is metered again, and memory is released as the one after begins.
"""
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps in a row: mean seconds of forward, loss and backward."""

    seconds: float
    resident_bytes: int
    """High-water mark of resident memory, above what was resident before the model was made."""


class Trainer:
    """A workload under a mode. The optimizer runs between the steps, outside all figures."""

    def __init__(self, workload: str, mode: Mode, start_bytes: int = 0) -> None:
        self.module, self.args, self.loss = make_step(workload)
        self.call, self.backend = mode.apply(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), LEARNING_RATE, MOMENTUM)
        self.start_bytes = start_bytes
        self.steps = 0

    def step(self) -> tuple[Tensor, float]:
        """One step, seeded by its number: the loss, and seconds of forward, loss and backward."""
        torch.manual_seed(self.steps)
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.loss(self.call(*self.args))
        torch.autograd.backward(loss)
        seconds = time.perf_counter() - start
        self.steps += 1
        return loss, seconds

    def train(self) -> float:
        """One step with the optimizer; returns the seconds of the step without it."""
        _, seconds = self.step()
        self.optimizer.step()
        return seconds

    def warm_up(self) -> tuple[float, ...]:
        """Train until nothing changes any more: outcore has planned, and has metered its plan.

        Raises InfeasibleError if no plan fits.
        """
        seconds = [self.train() for _ in range(FEWEST_WARM_UPS)]
        while not self._steady() and len(seconds) < MOST_WARM_UPS:
            seconds.append(self.train())
        if self.backend is not None:
            seconds += [self.train() for _ in range(LAST_WARM_UPS)]
        return tuple(seconds)

    def turn(self, steps: int = 1) -> Turn:
        """Time `steps` steps."""
        memory.reset_high_water()
        seconds = [self.train() for _ in range(steps)]
        return Turn(sum(seconds) / steps, memory.high_water_bytes() - self.start_bytes)

    def seconds(self, at_most: float, most_steps: int) -> tuple[float, int]:
        """Median seconds of steps in a row, and their number: at least 3, more if time is left."""
        end = time.perf_counter() + at_most
        seconds = [self.train() for _ in range(3)]
        while len(seconds) < most_steps and time.perf_counter() < end:
            seconds.append(self.train())
        return median(seconds), len(seconds)

    def peak_bytes(self) -> int:
        """The most tensor bytes during a step, from torch's allocator events; all tensors count."""
        self.optimizer.zero_grad()  # the meter cannot tell the size of what was there before it
        gc.collect()
        held = resident_bytes(_CPU)
        _, reading = metered(self.step)
        self.optimizer.step()
        return held + reading.peak_bytes()

    def digests(self) -> tuple[str, ...]:
        """One step's loss, gradients and buffers, each as a digest of its bytes."""
        loss, _ = self.step()
        found = results(self.module, loss)
        self.optimizer.step()
        return found

    def report(self) -> dict[str, Any]:
        """The report of outcore as plain values; empty for other modes."""
        return {} if self.backend is None else self.backend.report().to_dict()

    def problem(self) -> Problem:
        """The problem that outcore planned for: its one graph, as profiled here."""
        assert self.backend is not None
        assert self.backend.engine is not None
        (graph,) = self.backend.engine.registry.statuses()
        assert graph.planned is not None
        return graph.planned.problem

    def _steady(self) -> bool:
        return self.backend is None or self.backend.report().measured_peak_bytes is not None


def alone(workload: str, mode: Mode) -> Trainer:
    """A Trainer for a separate process, with malloc tuned and the machinery of `mode` loaded."""
    own_malloc()
    _rehearse(mode)
    return Trainer(workload, mode, memory.resident_bytes())


def results(module: nn.Module, loss: Tensor) -> tuple[str, ...]:
    """Digests of the loss, the gradients and the buffers of a step that just ran."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return digests((loss, *gradients, *module.buffers()))


def _rehearse(mode: Mode) -> None:
    """Train a tiny model, so that what a mode loads does not count as memory of the next model."""
    tiny = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 8),
    )
    rehearsed = Outcore("pooch", "1GiB") if isinstance(mode, Outcore) else mode
    call, backend = (Eager() if isinstance(mode, Checkpoint) else rehearsed).apply(tiny)
    for _ in range(FEWEST_WARM_UPS * 2):
        torch.autograd.backward(call(torch.ones(4, 3, 16, 16)).sum())
    driver = backend.engine.driver if backend is not None and backend.engine is not None else None
    del call, backend
    torch.compiler.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if driver is not None:
        driver.bound_memory(int, 0)  # releases what it kept for its next tensors
