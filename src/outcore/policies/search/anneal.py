"""anneal: simulated annealing: walks that accept ever fewer changes for the worse.

What it is worth to keep or drop a buffer depends on what its neighbors in time do. So changes of
neighbors find what single changes cannot (`evaluate/walk.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from outcore.evaluate import Evaluator
from outcore.policies.search.space import Kinds, Space
from outcore.policies.search.value import start_by_value
from outcore.policies.search.walks import Found, Stage, Walks

STAGES = (
    Stage(0.25, (1.5e-3, 4e-3), afresh=True),
    Stage(0.25, (1.5e-3, 5e-4), afresh=True),
    Stage(0.5, (1e-3, 3e-4)),
)
"""Short walks from each start, hot and cool, show which start leads further; long walks then
continue from the best of them. Cool walks are better if many buffers are small relative to the
budget, hot ones if few are."""

STAGES_IN_DEEP = (Stage(1.0, (1.5e-3, 5e-4)),)
"""The stages with fewer than `FEW_STEPS` steps for each gap: too few to divide."""

TIDY = 0.1
"""The largest part of a walk's evaluations that is used to return to defaults that cost nothing."""


ROWS, ROWS_IN_DEEP = 0.1, 0.8
"""The share of the changes that apply to a stretch of gaps with the same structure. The second is
for fewer than `FEW_STEPS` steps for each gap, so that repeated layers are decided on together."""

FEW_STEPS = 10
"""With fewer steps for each gap than this, a network counts as deep."""

LEAST_SECONDS = 1e-3
"""The time that a walk has at least, even after the deadline."""

TIDYING = 0.1
"""The part of the time before a deadline that is left for tidying."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search."""

    evaluations: int
    """Evaluations of each walk; fewer if the deadline comes first."""
    walks: int = 1
    """How many walks there are."""
    deadline: float = inf
    """A time of `time.perf_counter`, or inf."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; at least `LEAST_SECONDS`, for one look at the clock."""
        return max(LEAST_SECONDS, self.deadline - time.perf_counter())


class Annealing:
    """Walks through a space from the best of some starts; `best` is the best found so far."""

    def __init__(self, space: Space, evaluator: Evaluator, seed: int) -> None:
        self.space, self.evaluator, self.seed = space, evaluator, seed
        self.best = Found(space.default_kinds.copy(), inf)

    @property
    def found(self) -> bool:
        """Whether anything so far fits."""
        return self.best.seconds < inf

    def start(self, kinds: Kinds) -> None:
        """Start from `kinds` if they are the best so far."""
        found = self.evaluator.evaluate(kinds)
        if found.fits and found.seconds < self.best.seconds:
            self.best = Found(kinds.copy(), found.seconds)

    def leave_out(self, gaps: Collection[int]) -> None:
        """Decide on none of these gaps, except those not at their default in the best so far."""
        usual, kinds = self.space.default_kinds, self.best.kinds
        self.space = self.space.without([i for i in gaps if kinds[i] == usual[i]])

    def run(self, effort: Effort) -> Kinds:
        """The best kinds found. The last evaluations return to defaults that cost nothing.

        Does not search if no start fits, or if the time of the best step is 0.
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
        """Run all stages of walks."""
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
        """The best so far, and after it the start by value if that is another one.

        If the start by value is faster, it becomes the best and the only start.
        """
        by_value = start_by_value(self.space, self.evaluator, deadline)
        if by_value is None or by_value.seconds == self.best.seconds:
            return [self.best]
        if by_value.seconds < self.best.seconds:
            self.best = by_value
            return [by_value]
        return [self.best, by_value]

    def _steps(self, effort: Effort) -> float:
        """How many evaluations `effort` allows, in number and in time."""
        if effort.deadline == inf:
            return effort.evaluations
        start = time.perf_counter()
        self.evaluator.evaluate(self.best.kinds)
        return min(effort.evaluations, effort.seconds_left / (time.perf_counter() - start))

    def _tidy(self, evaluations: int, deadline: float) -> None:
        """Return to defaults that cost nothing, within this many evaluations and the deadline."""
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
