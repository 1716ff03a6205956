"""Trainer: one workload trained in one way, in a separate process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.gpu.instruments import Instruments, Memory, Peaks, instruments
from benchmarks.gpu.kept import files_of
from benchmarks.gpu.workloads import Step, Workload
from benchmarks.kit.digests import digests
from benchmarks.kit.modes import Call, Mode, SameGraph
from outcore import Backend, offload_optimizer
from outcore.measure import metered, resident_bytes
from outcore.runtime.graphs.status import State

FEWEST_WARM_UPS, MOST_WARM_UPS = 3, 14
LAST_WARM_UPS = 8
"""outcore's steps after the warm-up. Metering ends with the allocator's memory released, and it
takes time to get it again. If the allocator then releases memory in each step, its cache is
emptied once more, or the plan is left for another one."""
MOST_PLANS = 3
"""How often it warms up: again if the plan was left in the last steps."""
STEPS_TO_RECORD = 2
"""Steps until one is recorded: the first may be metered."""
PROBE_SEED = 1
PIECE = 1 << 24
"""Elements of the random vector that are made at once, as the device may have little memory left.
"""


class Result(NamedTuple):
    """The loss or a gradient of a step: a digest of its bytes, and two figures."""

    digest: str
    norm: float
    along: float
    """Its product with a fixed random vector of about norm 1."""


Results: TypeAlias = tuple[Result, ...]
"""A step's loss and gradients."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps in a row: mean seconds, optimizer included, and peaks of memory."""

    seconds: float
    peaks: Peaks
    host_seconds: float | None = None
    """Mean seconds in which the host gave the commands of a step."""


class Trainer:
    """A workload under a mode, on a device of which it may use `cap_bytes` (None: all).

    It uses the device from `warm_up` on. The optimizer keeps its state (away between its steps, if
    `offloads_state`), and its learning rate is zero. So every step is the same, and results of any
    two steps can be compared. (If lengths differ, those with results have the same length.)
    """

    instruments: Instruments
    work: Step
    call: Call
    backend: Backend | None
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        workload: Workload,
        mode: Mode,
        device: str,
        cap_bytes: int | None,
        offloads_state: bool = False,  # noqa: FBT001, FBT002 - workers pass no keywords
    ) -> None:
        self.workload, self.mode, self.kind, self.cap_bytes = workload, mode, device, cap_bytes
        self.offloads_state = offloads_state
        self.steps = 0
        self._traced: Call | None = None

    def warm_up(self) -> tuple[float, ...]:
        """Make the model, and train until nothing changes any more; returns seconds of each step.

        Raises InfeasibleError if no plan fits, torch's OutOfMemoryError if the step does not fit.
        """
        self.instruments = instruments(self.kind)
        if self.cap_bytes is not None:
            self.instruments.cap(self.cap_bytes)
        self.work = self.workload.build(self.instruments.device)
        self.call, self.backend = self.mode.apply(self.work.module)
        self.optimizer = self.work.optimizer()
        if self.offloads_state:
            offload_optimizer(self.optimizer)
        seconds = self._settled(FEWEST_WARM_UPS)
        if self.backend is None:
            return tuple(seconds)
        for _ in range(MOST_PLANS):
            for _ in range(LAST_WARM_UPS):
                self.train()
            self.instruments.finish()
            if self._steady():
                break
            seconds += self._settled(1)
        return tuple(seconds)

    def refused(self) -> int | None:
        """How many requests for memory failed so far; None if the device does not count."""
        return self.instruments.refused()

    def train(self) -> Tensor:
        """One step, seeded by its number."""
        torch.manual_seed(self.steps)
        self.optimizer.zero_grad()
        loss = self.work.loss(self.call, self.steps)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.steps += 1
        return loss

    def turn(self, steps: int) -> Turn:
        """Time `steps` steps; the host waits for the device before and after."""
        self.instruments.finish()
        self.instruments.reset()
        start = time.perf_counter()
        for _ in range(steps):
            self.train()
        host_seconds = time.perf_counter() - start
        self.instruments.finish()
        seconds = time.perf_counter() - start
        return Turn(seconds / steps, self.instruments.peaks(), host_seconds / steps)

    def metered_bytes(self) -> int:
        """The most tensor bytes during a step, from events of torch's allocator."""
        self.optimizer.zero_grad()  # the meter cannot tell the size of what was there before it
        gc.collect()
        engine = None if self.backend is None else self.backend.engine
        if engine is not None:  # only one meter can run, and new lengths have outcore's run
            engine.metering.end(whole=False)
        held = resident_bytes(self.instruments.device)
        _, reading = metered(self.train)
        return held + reading.peak_bytes()

    def results(self) -> Results:
        """Results of a step with a fixed seed."""
        made = self._made(self.call)
        return tuple(map(_result, made, digests(made)))

    def digests(self) -> tuple[str, ...]:
        """Digests of these results, of another such step: they take less time."""
        return digests(self._made(self.call))

    def traced_digests(self) -> tuple[str, ...]:
        """The same with the graph, and so the kernels, that outcore runs."""
        if self._traced is None:
            self._traced, _ = SameGraph().apply(self.work.module)
        return digests(self._made(self._traced))

    def settle(self) -> None:
        """Release what steps outside the turns have left, and return to the state before them."""
        self.optimizer.zero_grad()
        gc.collect()
        self.instruments.release()
        self.train()

    def memory(self) -> Memory | None:
        """The device's memory now; None if it is shared with the host."""
        return self.instruments.memory()

    def report(self) -> dict[str, Any]:
        """The report of outcore as plain values, with `placed_steps`; empty for other modes."""
        backend = self.backend
        if backend is None or backend.engine is None:
            return {}
        placed = backend.engine.placing.steps
        return backend.report().to_dict() | {"placed_steps": placed}

    def recorded(self) -> dict[str, Any]:
        """The report, with a recorded step; empty for other modes than outcore's."""
        if self.backend is None:
            return {}
        self.backend.record_step()
        for _ in range(STEPS_TO_RECORD):
            self.train()
        clocks = self.instruments.clocks()  # the device may have work left
        return self.report() | {"clocks": clocks}

    def files(self) -> dict[str, bytes]:
        """Files for later analysis, by name; none for other modes than outcore's."""
        return {} if self.backend is None else files_of(self.backend)

    def _made(self, call: Callable[..., Any]) -> tuple[Tensor, ...]:
        torch.manual_seed(PROBE_SEED)
        self.optimizer.zero_grad()
        loss = self.work.loss(call)
        torch.autograd.backward(loss)
        return loss, *(p.grad for p in self.work.module.parameters() if p.grad is not None)

    def _settled(self, fewest: int) -> list[float]:
        """Train until there is a plan and its peak is known; returns seconds of each step."""
        seconds: list[float] = []
        while len(seconds) < fewest or not (self._steady() or len(seconds) >= MOST_WARM_UPS):
            start = time.perf_counter()
            self.train()
            self.instruments.finish()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _steady(self) -> bool:
        if self.backend is None:
            return True
        report = self.backend.report()
        return report.state != State.PROFILING.value and report.measured_peak_bytes is not None


def unmade() -> Trainer:
    """A Trainer whose constructor is still to be called, in a process that is ready for it."""
    return Trainer.__new__(Trainer)


def _result(tensor: Tensor, digest: str) -> Result:
    """The figures are computed on the device, to within far less than is told apart."""
    flat = tensor.detach().flatten()
    generator = torch.Generator(flat.device).manual_seed(PROBE_SEED)
    along = torch.zeros((), device=flat.device)
    for piece in torch.split(flat, PIECE):
        along += piece.float() @ torch.randn(len(piece), generator=generator, device=flat.device)
    length = max(1, len(flat)) ** 0.5
    return Result(digest, float(flat.float().norm()), float(along) / length)
