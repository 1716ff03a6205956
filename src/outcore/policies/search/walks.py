"""walks: run walks in parallel, each on its own core if there are enough."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outcore.cores import usable_cores
from outcore.evaluate import Evaluator
from outcore.policies.search.space import COLD, Kinds, Space
from outcore.units import format_seconds

log = logging.getLogger("outcore.search")

TOLD_EVERY = 5.0
"""Seconds between two lines of the log, at least."""


class Found(NamedTuple):
    """Kinds, and the seconds of their step; inf if they do not fit."""

    kinds: Kinds
    seconds: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One walk for each evaluator, all of the same length."""

    part: float
    """The part of all steps that each walk makes in this stage."""
    hot: tuple[float, ...]
    """The temperatures at which the walks begin, in turn, as fractions of the step's time."""
    afresh: bool = False
    """Whether the walks begin at the starts, in turn; otherwise all begin at the best so far."""


@dataclass(slots=True)
class Progress:
    """Logs how far long walks are."""

    done: float = 0.0
    """The part of all steps that earlier stages made."""
    told: float = field(default_factory=time.perf_counter)
    """When the last line was logged, a time of `time.perf_counter`."""

    def tell(self, part: float, seconds: float) -> None:
        """Log that `part` more is done, and that the best plan takes `seconds` a step."""
        now = time.perf_counter()
        if now - self.told >= TOLD_EVERY:
            self.told = now
            best = format_seconds(seconds)
            percent = 100 * (self.done + part)
            log.info("search: %.0f %% done, the best plan takes %s a step", percent, best)


class Walks:
    """`count` walks. The first uses `evaluator`, each other one has its own."""

    def __init__(self, space: Space, evaluator: Evaluator, count: int, seed: int) -> None:
        self.space = space
        others = (Evaluator(evaluator.problem) for _ in range(1, count))
        self.evaluators = (evaluator, *others)
        self.seeds = np.random.SeedSequence(seed)
        self.progress = Progress()

    def go(
        self,
        stage: Stage,
        starts: Sequence[Found],
        *,
        steps: int,
        unit: float,
        rows: float,
        most_seconds: float,
    ) -> list[Found]:
        """What each walk of `stage` finds from its start, one of `starts` in turn.

        - `steps`: the steps of all stages together.
        - `unit`: seconds of a step of the network; temperatures are fractions of it.
        - `most_seconds`: the most wall-clock time for the stage; walks that share a core share it.

        `rows` and `most_seconds` are explained at `Walk.go`.
        """
        count = len(self.evaluators)
        cores = min(count, usable_cores())
        seeds = self.seeds.spawn(count)
        progress = self.progress

        def tell(done: float, seconds: float) -> None:
            progress.tell(stage.part * done, seconds)

        def walk(index: int) -> Found:
            space, hot = self.space, stage.hot[index % len(stage.hot)]
            each = self.evaluators[index].walk(space.allowed, space.alike, seeds[index])
            each.begin(*starts[index % len(starts)])
            found = each.go(
                int(steps * stage.part),
                hot * unit,
                COLD * unit,
                rows=rows,
                most_seconds=most_seconds * cores / count,
                watch=None if index else tell,
            )
            return Found(*found)

        with ThreadPoolExecutor(cores) as threads:
            found = list(threads.map(walk, range(count)))
        progress.done += stage.part
        return found
