"""optimizer: what it saves and costs to keep an optimizer's state on the disk between its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import LEARNING_RATE
from benchmarks.cpu.workloads import make_step
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.digests import digests
from benchmarks.kit.rounds import Turns, median_of_ratios, seconds, spread, take_turns
from benchmarks.kit.rows import Check, Row, at_most
from benchmarks.kit.worker import Worker
from outcore import offload_optimizer
from outcore.execute.malloc import own_malloc
from outcore.measure import metered, resident_bytes

LIMIT = 1.5
"""The largest time of an iteration, relative to one with the state in memory."""
WARM_UPS = 2
SLICE_BYTES = 32 << 20
PLACES = {"memory": False, "disk": True}
"""Where the state is, and whether it is offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stateful(Row):
    """AdamW with its state in one place. An iteration is a step and the update of the weights."""

    workload: str
    state: str
    turns: int
    iteration_seconds: float
    of_memory_ratio: float
    quartiles: str
    held_bytes: int
    """Bytes of tensors between iterations, without gradients."""
    peak_bytes: int
    """The most bytes of tensors in an iteration."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some iterations in a row."""

    seconds: float
    """Mean seconds of one."""


class Updating:
    """A model that is trained as plain PyTorch, and its optimizer."""

    def __init__(self, workload: str, *, away: bool) -> None:
        own_malloc()
        self.module, self.args, self.loss = make_step(workload)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), LEARNING_RATE)
        if away:
            offload_optimizer(self.optimizer, slice_size=SLICE_BYTES)
        self._iterations = 0

    def iterate(self) -> None:
        """One iteration, seeded by its number."""
        torch.manual_seed(self._iterations)
        self._iterations += 1
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(self.module(*self.args)))
        self.optimizer.step()

    def turn(self, iterations: int = 1) -> Turn:
        """Time some iterations."""
        start = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        return Turn((time.perf_counter() - start) / iterations)

    def held_and_peak_bytes(self) -> tuple[int, int]:
        """Bytes of tensors before an iteration, and the most in it."""
        self.optimizer.zero_grad()
        gc.collect()
        held = resident_bytes(torch.device("cpu"))
        _, reading = metered(self.iterate)
        return held, held + reading.peak_bytes()

    def weights(self) -> tuple[str, ...]:
        """The parameters, as digests."""
        return digests(tuple(self.module.parameters()))


def updating(workload: str, away: bool) -> Updating:  # noqa: FBT001 - workers pass no keywords
    """What a worker makes."""
    return Updating(workload, away=away)


def optimizer(scale: Scale, patience: Patience) -> Iterator[Row]:
    """The state in memory, and on the disk."""
    if patience.over():
        return
    workload = scale.text_workload
    with ExitStack() as stack:
        workers = {
            place: stack.enter_context(Worker(updating, workload, away))
            for place, away in PLACES.items()
        }
        for worker in workers.values():
            worker.ask(Updating.turn, WARM_UPS)
        turns = take_turns(workers, Updating.turn, scale.rounds, 1, patience)
        memory = {p: worker.ask(Updating.held_and_peak_bytes) for p, worker in workers.items()}
        here, away = (worker.ask(Updating.weights) for worker in workers.values())
    for place in PLACES:
        yield _row(workload, place, turns, memory[place], same=here == away)


def _row(
    workload: str, place: str, turns: dict[str, Turns[Turn]], memory: tuple[int, int], *, same: bool
) -> Stateful:
    mine, reference = turns[place], turns["memory"]
    ratio = median_of_ratios(mine, reference)
    checks = (Check("weights bitwise equal", same), *at_most("of in memory", ratio, LIMIT))
    return Stateful(
        workload=workload,
        state=place,
        turns=len(mine),
        iteration_seconds=seconds(mine),
        of_memory_ratio=ratio,
        quartiles=spread(mine, reference),
        held_bytes=memory[0],
        peak_bytes=memory[1],
        checks=checks if PLACES[place] else (),
    )
