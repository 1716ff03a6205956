"""training: train a network for a few iterations, in-core or inside a budget, for comparison.

torch is imported inside functions: it takes seconds to load, and `outcore --help` does not need it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from outcore.api import Backend
    from outcore.networks import Batch, NetworkSpec

LEARNING_RATE = 0.01
MOMENTUM = 0.9
WARM_UP = 2
"""In-core iterations that are not timed: the first ones are slower, as they allocate memory."""
STEADY = "training"
"""The phase whose iterations count for the time."""
METERING = "metering"
"""The phase of the last iteration, which a profiler slows down."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, with the same seeds and batches in every run."""

    spec: NetworkSpec
    options: dict[str, Any]
    """Arguments of `spec.build`."""
    samples: int
    """Per batch."""
    batches: Callable[[], Iterator[Batch]]
    """Starts the same sequence of batches again; the batches are on the CPU."""
    iterations: int
    seed: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration."""

    phase: str
    loss: float
    seconds: float
    """Of forward, loss and backward."""
    gradients: str
    """Digest of the bytes of all gradients."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """All iterations of one run, and the peak memory of the last one, everything counted."""

    title: str
    steps: tuple[Iteration, ...]
    peak_bytes: int

    @property
    def seconds(self) -> float | None:
        """Median time of the iterations in the phase STEADY; None if there was none."""
        steady = [step.seconds for step in self.steps if step.phase == STEADY]
        return median(steady) if steady else None


class Mode(Protocol):
    """A way to run the model."""

    @property
    def title(self) -> str:
        """The run's name in tables and progress bars."""
        ...

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """The callable that runs the model."""
        ...

    def phase(self, iteration: int) -> str:
        """The phase of the iteration that is about to begin."""
        ...


@dataclass(frozen=True, slots=True)
class InCore:
    """Plain PyTorch: eager, or compiled by one of torch's backends."""

    title: str = "in-core"
    backend: str | None = None

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """The model itself, or compiled by `backend`."""
        import torch  # noqa: PLC0415 - see the top

        return model if self.backend is None else torch.compile(model, backend=self.backend)

    def phase(self, iteration: int) -> str:
        """Warm-up for the first WARM_UP iterations, then STEADY."""
        return "warm-up" if iteration < WARM_UP else STEADY


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Training under an outcore Backend."""

    backend: Backend
    title: str = "budgeted"

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """The model, compiled by outcore."""
        import torch  # noqa: PLC0415 - see the top

        return torch.compile(model, backend=self.backend)

    def phase(self, iteration: int) -> str:
        """Profiling up to and including the first planned iteration, which the backend meters."""
        report = self.backend.report()
        waiting = report.measured_peak_bytes is None and (report.graphs or not iteration)
        return "profiling" if waiting else STEADY


def train(task: Task, mode: Mode, watch: Callable[[Iteration], None]) -> TrainingRun:
    """Train from the task's seed; call `watch` after each iteration. The last one is metered.

    On a GPU, torch uses deterministic kernels for the ops that have one.
    """
    with repeatable(task.device):
        return _trained(task, mode, watch)


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Make torch use deterministic kernels on a GPU. On a CPU they are deterministic anyway."""
    import torch  # noqa: PLC0415 - see the top

    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch's
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as above
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # as above


def _trained(task: Task, mode: Mode, watch: Callable[[Iteration], None]) -> TrainingRun:
    import torch  # noqa: PLC0415 - see the top

    torch.compiler.reset()
    gc.collect()  # else garbage of an earlier run would count as held
    torch.manual_seed(task.seed)
    model = task.spec.build(**task.options).to(task.device)
    called = mode.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    steps: list[Iteration] = []
    peak_bytes = 0
    for iteration, batch in enumerate(islice(task.batches(), task.iterations), 1):
        optimizer.zero_grad()
        phase = mode.phase(len(steps))
        step = partial(_step, task, called, batch.to(task.device))
        if iteration == task.iterations:
            phase, ((loss, seconds), peak_bytes) = METERING, _metered(step, task.device)
        else:
            loss, seconds = step()
        steps.append(Iteration(phase, loss, seconds, digest(model)))
        optimizer.step()
        watch(steps[-1])
    return TrainingRun(mode.title, tuple(steps), peak_bytes)


def _step(task: Task, called: Callable[..., Any], batch: Batch) -> tuple[float, float]:
    """The loss, and the seconds of forward, loss and backward."""
    import torch  # noqa: PLC0415 - see the top

    if task.device != "cpu":
        torch.cuda.synchronize(task.device)  # do not time work that the optimizer queued
    start = time.perf_counter()
    loss = task.spec.loss(called, batch)
    torch.autograd.backward(loss)
    return loss.item(), time.perf_counter() - start


def _metered(step: Callable[[], T], device: str) -> tuple[T, int]:
    """The step's result and peak bytes, by a meter that reads torch's allocator, not outcore."""
    import torch  # noqa: PLC0415 - see the top

    from outcore.measure import metered, resident_bytes  # noqa: PLC0415 - loads torch

    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return step(), torch.cuda.max_memory_allocated(device)
    resident = resident_bytes(torch.device("cpu"))
    result, reading = metered(step)
    return result, resident + reading.peak_bytes()


def digest(model: nn.Module) -> str:
    """A digest of the bytes of the model's gradients, parameter by parameter."""
    found = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        if parameter.grad is not None:
            found.update(parameter.grad.cpu().contiguous().numpy().data)
    return found.hexdigest()
