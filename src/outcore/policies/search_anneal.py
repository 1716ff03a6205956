"""Annealing: a walk over kinds that takes what is better, and ever less of what is worse.

Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983. A change
is of one gap, of two that trade their kinds, of a few neighbours, or of a stretch of gaps that are
alike. What a kept copy or a dropped one is worth depends on what its neighbours in time do, so that
changes of neighbours find what single ones cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np

from outcore.evaluate import KEEP, Evaluator
from outcore.policies.search_space import Kinds, Space

HOT, COLD = 1.5e-3, 3e-5
"""Temperatures at the start and at the end, as parts of the step's time."""

TIDY = 0.1
"""The most of the effort that goes into keeping what costs nothing to keep."""

NEAR = 6
"""How many gaps further on, in order of the trace, a neighbour may be."""

SEVERAL = 4
"""The most neighbours that are changed together."""

Change = dict[int, int]
"""Index of a gap -> its new kind."""


@dataclass(slots=True)
class Found:
    """Kinds, and the seconds of their step; inf where they do not fit."""

    kinds: Kinds
    seconds: float


class Annealing:
    """A walk of `evaluations` steps through a space, from the best of some starts."""

    def __init__(self, space: Space, evaluator: Evaluator, seed: int) -> None:
        self.space, self.evaluator = space, evaluator
        self.random = np.random.default_rng(seed)
        self.gaps = tuple(space.allowed)
        self.best = Found(np.full(len(space.gaps), KEEP, np.int8), inf)
        moves: tuple[tuple[float, Callable[[Kinds], Change]], ...] = (
            (0.40, self._single),
            (0.20, self._trade),
            (0.15, self._few),
            (0.15, self._trade_nearby),
            (0.10, self._row if space.alike else self._single),
        )
        self.moves = [move for _, move in moves]
        self.bounds = np.cumsum([share for share, _ in moves])

    @property
    def found(self) -> bool:
        """Whether anything so far fits."""
        return self.best.seconds < inf

    def start(self, kinds: Kinds) -> None:
        """Begin from here if it is the best so far."""
        self._judge(kinds)

    def run(self, evaluations: int) -> Kinds:
        """The best kinds found after so many evaluations; the last of them keep what costs nothing.

        Nothing is found where nothing fits, and nothing better than a step that takes no time.
        """
        kinds, seconds = self.best.kinds.copy(), self.best.seconds
        if not self.gaps or not 0 < seconds < inf:
            return self.best.kinds
        tidying = min(len(self.gaps), int(evaluations * TIDY))
        hot = HOT * seconds
        cooling = (COLD / HOT) ** (1 / max(1, evaluations - tidying))
        for _ in range(evaluations - tidying):
            hot *= cooling
            changed = self._change(kinds)
            before = {index: kinds[index] for index in changed}
            for index, kind in changed.items():
                kinds[index] = kind
            found = self._judge(kinds)
            if found <= seconds or self.random.random() < exp((seconds - found) / hot):
                seconds = found
            else:
                for index, kind in before.items():
                    kinds[index] = kind
        self._tidy(tidying)
        return self.best.kinds

    def _judge(self, kinds: Kinds) -> float:
        """Seconds of a step with `kinds`; the best are remembered."""
        found = self.evaluator.evaluate(kinds)
        seconds = found.seconds if found.fits else inf
        if seconds < self.best.seconds:
            self.best = Found(kinds.copy(), seconds)
        return seconds

    def _tidy(self, evaluations: int) -> None:
        """Keep what costs nothing to keep, as far as so many evaluations tell."""
        moved = [index for index in self.gaps if self.best.kinds[index] != KEEP]
        for index in moved[:evaluations]:
            kinds = self.best.kinds.copy()
            kinds[index] = KEEP
            found = self.evaluator.evaluate(kinds)
            if found.fits and found.seconds <= self.best.seconds:
                self.best = Found(kinds, found.seconds)

    # ---- changes --------------------------------------------------------------------------------

    def _change(self, kinds: Kinds) -> Change:
        """A change; empty where what was drawn changes nothing."""
        drawn = int(np.searchsorted(self.bounds, self.random.random()))
        return self.moves[min(drawn, len(self.moves) - 1)](kinds)

    def _single(self, kinds: Kinds) -> Change:
        """One gap gets another kind."""
        index = self._one_of(self.gaps)
        return {index: self._one_of([k for k in self.space.allowed[index] if k != kinds[index]])}

    def _trade(self, kinds: Kinds) -> Change:
        """Two gaps trade their kinds."""
        return self._traded(kinds, self._one_of(self.gaps), self._one_of(self.gaps))

    def _trade_nearby(self, kinds: Kinds) -> Change:
        """Two gaps trade that begin about the same time."""
        place = self._below(len(self.gaps))
        other = min(place + 1 + self._below(NEAR), len(self.gaps) - 1)
        return self._traded(kinds, self.gaps[place], self.gaps[other])

    def _traded(self, kinds: Kinds, one: int, other: int) -> Change:
        allowed = self.space.allowed
        if kinds[other] not in allowed[one] or kinds[one] not in allowed[other]:
            return {}
        return {one: int(kinds[other]), other: int(kinds[one])} if one != other else {}

    def _few(self, _kinds: Kinds) -> Change:
        """A few gaps that follow one another get a kind each."""
        place = self._below(len(self.gaps))
        several = self.gaps[place : place + 2 + self._below(SEVERAL - 1)]
        return {index: self._one_of(self.space.allowed[index]) for index in several}

    def _row(self, _kinds: Kinds) -> Change:
        """A stretch of gaps alike all get one kind."""
        group = self.space.alike[self._below(len(self.space.alike))]
        first, last = sorted((self._below(len(group)), self._below(len(group))))
        kind = self._one_of(self.space.allowed[group[first]])
        stretch = group[first : last + 1]
        return {index: kind for index in stretch if kind in self.space.allowed[index]}

    def _one_of(self, items: Sequence[int]) -> int:
        return items[self._below(len(items))]

    def _below(self, count: int) -> int:
        return int(self.random.integers(count))
