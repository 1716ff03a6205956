"""Annealing: walks over kinds that take what is better, and ever less of what is worse.

What a kept copy or a dropped one is worth depends on what its neighbours in time do, so that
changes of neighbours find what single ones cannot (`evaluate/walk.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from outcore.evaluate import Evaluator
from outcore.policies.search_space import Kinds, Space
from outcore.policies.search_value import start_by_value
from outcore.policies.search_walks import Found, Stage, Walks

STAGES = (
    Stage(0.25, (1.5e-3, 4e-3), afresh=True),
    Stage(0.25, (1.5e-3, 5e-4), afresh=True),
    Stage(0.5, (1e-3, 3e-4)),
)
"""Short walks from each start, hot and cool, tell what leads to more, and long ones go on from the
best of that. Cool ones are better where many buffers are small beside the budget, hot ones where
few are."""

STAGES_IN_DEEP = (Stage(1.0, (1.5e-3, 5e-4)),)
"""The same with fewer than `FEW_STEPS` steps for each gap: too few to be divided."""

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
        self.best = Found(space.default_kinds.copy(), inf)

    @property
    def found(self) -> bool:
        """Whether anything so far fits."""
        return self.best.seconds < inf

    def start(self, kinds: Kinds) -> None:
        """Begin from here if it is the best so far."""
        found = self.evaluator.evaluate(kinds)
        if found.fits and found.seconds < self.best.seconds:
            self.best = Found(kinds.copy(), found.seconds)

    def leave_out(self, gaps: Collection[int]) -> None:
        """Decide on none of these gaps, but where the best so far is not as by default."""
        usual, kinds = self.space.default_kinds, self.best.kinds
        self.space = self.space.without([i for i in gaps if kinds[i] == usual[i]])

    def run(self, effort: Effort) -> Kinds:
        """The best kinds found; the last evaluations keep what costs nothing.

        Nothing is found where nothing fits, and nothing better than a step that takes no time.
        """
        if not self.space.allowed or not 0 < self.best.seconds < inf:
            return self.best.kinds
        tidying = min(len(self.space.allowed), int(effort.evaluations * TIDY))
        steps = effort.evaluations - tidying
        if steps > 0 and effort.walks > 0:
            self._walk(effort, steps)
        self._tidy(tidying, effort.deadline)
        return self.best.kinds

    def _walk(self, effort: Effort, steps: int) -> None:
        """All stages of walks."""
        deep = self._steps(effort) < FEW_STEPS * len(self.space.allowed)
        rows = ROWS_IN_DEEP if deep else ROWS
        stages = STAGES_IN_DEEP if deep else STAGES
        starts = deque([self.best] if deep else self._starts(effort.deadline))
        walks = Walks(self.space, self.evaluator, effort.walks, self.seed)
        left = 1.0
        for stage in stages:
            seconds = 0.0
            if effort.deadline < inf:
                seconds = effort.seconds_left * (1 - TIDYING) * stage.part / left
            found = walks.go(
                stage,
                starts if stage.afresh else [self.best],
                steps=steps,
                unit=self.best.seconds,
                rows=rows,
                most_seconds=seconds,
            )
            self.best = min((self.best, *found), key=lambda each: each.seconds)
            starts.rotate(-1)
            left -= stage.part

    def _starts(self, deadline: float) -> list[Found]:
        """The best so far, and after it the start by value where that is another."""
        by_value = start_by_value(self.space, self.evaluator, deadline)
        if by_value is None or by_value.seconds == self.best.seconds:
            return [self.best]
        if by_value.seconds < self.best.seconds:
            self.best = by_value
            return [by_value]
        return [self.best, by_value]

    def _steps(self, effort: Effort) -> float:
        """How many steps there are, and is time for, as evaluations go."""
        if effort.deadline == inf:
            return effort.evaluations
        start = time.perf_counter()
        self.evaluator.evaluate(self.best.kinds)
        return min(effort.evaluations, effort.seconds_left / (time.perf_counter() - start))

    def _tidy(self, evaluations: int, deadline: float) -> None:
        """Leave as by default what costs nothing so, as far as so many evaluations tell in time."""
        usual = self.space.default_kinds
        moved = [index for index in self.space.allowed if self.best.kinds[index] != usual[index]]
        for index in moved[:evaluations]:
            if time.perf_counter() > deadline:
                return
            kinds = self.best.kinds.copy()
            kinds[index] = usual[index]
            found = self.evaluator.evaluate(kinds)
            if found.fits and found.seconds <= self.best.seconds:
                self.best = Found(kinds, found.seconds)
