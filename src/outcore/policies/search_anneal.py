"""Annealing: walks over kinds that take what is better, and ever less of what is worse.

What a kept copy or a dropped one is worth depends on what its neighbours in time do, so that
changes of neighbours find what single ones cannot (`evaluate/walk.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from outcore.evaluate import KEEP, Evaluator
from outcore.policies.search_space import Kinds, Space
from outcore.units import format_seconds

log = logging.getLogger("outcore.search")

HOT = (1.5e-3, 5e-4)
"""Temperatures that walks begin at, as parts of the step's time, in turn. The cooler one is better
where many buffers are small beside the budget, the hotter one where few are."""

COLD = 3e-5
"""The temperature that they end at."""

TIDY = 0.1
"""The most of a walk's evaluations that go into keeping what costs nothing to keep."""


ROWS, ROWS_IN_DEEP = 0.1, 0.8
"""The parts of the changes that are of a stretch of gaps alike; the second where there are fewer
than `FEW_STEPS` steps for each gap, so that repeated layers are decided on together."""

FEW_STEPS = 10

LEAST_SECONDS = 1e-3
"""What a walk has, however late it is."""

TIDYING = 0.1
"""The part of the time before a deadline that is left for tidying."""

TOLD_EVERY = 5.0
"""Seconds between two lines of the log."""


class Found(NamedTuple):
    """Kinds, and the seconds of their step; inf where they do not fit."""

    kinds: Kinds
    seconds: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search: `evaluations` of each of `walks`; less where the `deadline` comes first.

    That is a time of `time.perf_counter`, or inf.
    """

    evaluations: int
    walks: int = 1
    deadline: float = inf

    @property
    def seconds_left(self) -> float:
        """Until the deadline; at least a little, for one look at the clock."""
        return max(LEAST_SECONDS, self.deadline - time.perf_counter())


class Annealing:
    """Walks through a space from the best of some starts; the best that any of them finds."""

    def __init__(self, space: Space, evaluator: Evaluator, seed: int) -> None:
        self.space, self.evaluator, self.seed = space, evaluator, seed
        self.best = Found(np.full(len(space.gaps), KEEP, np.int8), inf)

    @property
    def found(self) -> bool:
        """Whether anything so far fits."""
        return self.best.seconds < inf

    def start(self, kinds: Kinds) -> None:
        """Begin from here if it is the best so far."""
        found = self.evaluator.evaluate(kinds)
        if found.fits and found.seconds < self.best.seconds:
            self.best = Found(kinds.copy(), found.seconds)

    def run(self, effort: Effort) -> Kinds:
        """The best kinds found; the last evaluations keep what costs nothing.

        Nothing is found where nothing fits, and nothing better than a step that takes no time.
        """
        if not self.space.allowed or not 0 < self.best.seconds < inf:
            return self.best.kinds
        tidying = min(len(self.space.allowed), int(effort.evaluations * TIDY))
        steps = effort.evaluations - tidying
        if steps > 0 and effort.walks > 0:
            self.best = min((self.best, *self._walks(effort, steps)), key=lambda f: f.seconds)
        self._tidy(tidying, effort.deadline)
        return self.best.kinds

    def _walks(self, effort: Effort, steps: int) -> Sequence[Found]:
        """What each walk finds. They take the cores that there are."""
        seeds = np.random.SeedSequence(self.seed).spawn(effort.walks)
        deep = self._steps(effort, steps) < FEW_STEPS * len(self.space.allowed)
        rows = ROWS_IN_DEEP if deep else ROWS

        def walk(index: int) -> Found:
            evaluator = Evaluator(self.evaluator.problem) if index else self.evaluator
            kinds, seconds = self.best
            each = evaluator.walk(self.space.allowed, self.space.alike, seeds[index])
            each.begin(kinds, seconds)
            hot = HOT[index % len(HOT)] * seconds
            most = 0.0 if effort.deadline == inf else effort.seconds_left * (1 - TIDYING)
            watch = None if index else _teller()
            cold = COLD * seconds
            return Found(*each.go(steps, hot, cold, rows=rows, most_seconds=most, watch=watch))

        with ThreadPoolExecutor(min(effort.walks, os.cpu_count() or 1)) as threads:
            return list(threads.map(walk, range(effort.walks)))

    def _steps(self, effort: Effort, steps: int) -> float:
        """How many of `steps` there is time for, as evaluations go."""
        if effort.deadline == inf:
            return steps
        start = time.perf_counter()
        self.evaluator.evaluate(self.best.kinds)
        return min(steps, effort.seconds_left / (time.perf_counter() - start))

    def _tidy(self, evaluations: int, deadline: float) -> None:
        """Keep what costs nothing to keep, as far as so many evaluations tell in time."""
        moved = [index for index in self.space.allowed if self.best.kinds[index] != KEEP]
        for index in moved[:evaluations]:
            if time.perf_counter() > deadline:
                return
            kinds = self.best.kinds.copy()
            kinds[index] = KEEP
            found = self.evaluator.evaluate(kinds)
            if found.fits and found.seconds <= self.best.seconds:
                self.best = Found(kinds, found.seconds)


def _teller() -> Callable[[float, float], None]:
    """What tells the log how far a long walk is."""
    told = time.perf_counter()

    def tell(progress: float, seconds: float) -> None:
        nonlocal told
        now = time.perf_counter()
        if now - told >= TOLD_EVERY:
            told = now
            best = format_seconds(seconds)
            log.info("search: %.0f %% done, the best plan takes %s a step", 100 * progress, best)

    return tell
