"""returned: what it costs to return logits beside the loss, which no step gives a gradient."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cpu.scale import Scale
from benchmarks.cpu.workloads import make_step
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.digests import digests
from benchmarks.kit.rounds import Turns, median_of_ratios, seconds, spread, take_turns
from benchmarks.kit.rows import Check, Row, at_most
from benchmarks.kit.worker import Worker
from outcore import Backend
from outcore.execute.malloc import own_malloc
from outcore.measure import metered

LIMIT = 1.02
"""The largest time of outcore with logits, relative to the loss alone, and the most memory that
they add, relative to what they add in eager mode: the caller holds one copy."""
WARM_UPS = 5
"""Steps before the turns: outcore measures and plans in the first ones."""
BUDGET = "1TiB"
"""Everything fits: what is returned is all that differs."""
RUNS = tuple((by, whole) for by in ("eager", "aot_eager", "outcore") for whole in (False, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned(Row):
    """A training step by one compiler. `results`: what the model returns."""

    workload: str
    by: str
    results: str
    turns: int
    step_seconds: float
    of_alone_ratio: float
    """Its time, relative to that of the loss alone by the same compiler."""
    quartiles: str
    peak_bytes: int
    """The most bytes of tensors in a step, beyond those that are there before."""
    more_bytes: int
    """What is more than with the loss alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps in a row."""

    seconds: float
    """Mean seconds of one."""


class WithLoss(nn.Module):
    """A model with its loss, as those of transformers: the logits are returned if asked for."""

    def __init__(self, module: nn.Module, loss: Any, *, whole: bool) -> None:
        super().__init__()
        self.module, self.loss, self.whole = module, loss, whole

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """The loss, and perhaps the logits."""
        logits = self.module(*args)
        loss = self.loss(logits)
        return (loss, logits) if self.whole else (loss,)


class Returning:
    """A model that is trained by one compiler."""

    def __init__(self, workload: str, by: str, *, whole: bool) -> None:
        own_malloc()
        module, self.args, loss = make_step(workload)
        self.model = WithLoss(module, loss, whole=whole)
        backend: Any = Backend(budget=BUDGET) if by == "outcore" else by
        self.call: Any = self.model if by == "eager" else torch.compile(self.model, backend=backend)

    def step(self) -> None:
        """One step. The results are held until it is over, as a training loop holds them."""
        torch.manual_seed(0)
        self.model.zero_grad()
        results = self.call(*self.args)
        torch.autograd.backward(results[0])

    def turn(self, steps: int = 1) -> Turn:
        """Time some steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return Turn((time.perf_counter() - start) / steps)

    def peak_bytes(self) -> int:
        """The most bytes of tensors in a step."""
        self.model.zero_grad()
        _, reading = metered(self.step)
        return reading.peak_bytes()

    def gradients(self) -> tuple[str, ...]:
        """The gradients of the latest step, as digests."""
        return digests(tuple(p.grad for p in self.model.parameters() if p.grad is not None))


def returning(workload: str, by: str, whole: bool) -> Returning:  # noqa: FBT001 - workers pass no keywords
    """What a worker makes."""
    return Returning(workload, by, whole=whole)


def returned(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Each compiler, with the loss alone and with logits."""
    if patience.over():
        return
    workload = scale.returned_workload
    with ExitStack() as stack:
        workers = {
            _name(by, whole): stack.enter_context(Worker(returning, workload, by, whole))
            for by, whole in RUNS
        }
        for worker in workers.values():
            worker.ask(Returning.turn, WARM_UPS)
        turns = take_turns(workers, Returning.turn, scale.rounds, 1, patience)
        peaks = {name: worker.ask(Returning.peak_bytes) for name, worker in workers.items()}
        found = {name: worker.ask(Returning.gradients) for name, worker in workers.items()}
    for by, whole in RUNS:
        name, alone = _name(by, whole), _name(by, False)
        same = found[name] == found[_name("aot_eager", False)]
        held = peaks[_name("eager", True)] - peaks[_name("eager", False)]
        yield _row(workload, (by, whole), turns, (peaks[name], peaks[alone], held), same=same)


def _name(by: str, whole: bool) -> str:  # noqa: FBT001 - the two are a pair
    return f"{by}, {'loss and logits' if whole else 'loss'}"


def _row(
    workload: str,
    run: tuple[str, bool],
    turns: dict[str, Turns[Turn]],
    peaks: tuple[int, int, int],
    *,
    same: bool,
) -> Returned:
    by, whole = run
    mine, alone = turns[_name(by, whole)], turns[_name(by, False)]
    ratio, (peak, peak_alone, held) = median_of_ratios(mine, alone), peaks
    checks = (
        Check("gradients bitwise equal to aot_eager's", same),
        *at_most("time of the loss alone", ratio, LIMIT),
        *at_most("memory added, of eager's", (peak - peak_alone) / max(held, 1), LIMIT),
    )
    return Returned(
        workload=workload,
        by=by,
        results="loss, logits" if whole else "loss",
        turns=len(mine),
        step_seconds=seconds(mine),
        of_alone_ratio=ratio,
        quartiles=spread(mine, alone),
        peak_bytes=peak,
        more_bytes=peak - peak_alone,
        checks=checks if by == "outcore" and whole else (),
    )
