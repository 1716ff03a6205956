"""Walks side by side, each on a core of its own where there are enough."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outcore.evaluate import Evaluator
from outcore.policies.search_space import COLD, Kinds, Space
from outcore.units import format_seconds

log = logging.getLogger("outcore.search")

TOLD_EVERY = 5.0
"""Seconds between two lines of the log."""


class Found(NamedTuple):
    """Kinds, and the seconds of their step; inf where they do not fit."""

    kinds: Kinds
    seconds: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A walk each: `part` of all the steps there are.

    `hot`: the temperatures that they begin at, in turn, as parts of the step's time. `afresh`: they
    begin at the starts, in turn; else all begin at the best so far.
    """

    part: float
    hot: tuple[float, ...]
    afresh: bool = False


@dataclass(slots=True)
class Progress:
    """Tells the log how far long walks are. `done`: the part of the stages before."""

    done: float = 0.0
    told: float = field(default_factory=time.perf_counter)

    def tell(self, part: float, seconds: float) -> None:
        """So much is done, and the best plan takes `seconds` a step."""
        now = time.perf_counter()
        if now - self.told >= TOLD_EVERY:
            self.told = now
            best = format_seconds(seconds)
            percent = 100 * (self.done + part)
            log.info("search: %.0f %% done, the best plan takes %s a step", percent, best)


class Walks:
    """As many as `count`; the first takes `evaluator` for itself, each other one has its own."""

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

        `steps`: how many there are for all stages. `unit`: seconds of a step of the network, that
        temperatures are parts of. `most_seconds` are for all walks, shared where cores are; that
        and `rows` are explained at `Walk.go`.
        """
        count = len(self.evaluators)
        cores = min(count, os.cpu_count() or 1)
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
