"""Walk: simulated annealing over plans of one problem."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate import kernel as k
from outcore.evaluate.evaluator import Evaluator
from outcore.jit import native

CHUNK = 1024
"""Steps for which random numbers are drawn at once."""

SHORT_CHUNK = 16
"""Steps between two looks at the clock, if there is a time limit."""


class Walk:
    """Simulated annealing over the kinds of a plan's gaps, with the moves of `kernel.walk`.

    Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983. A move
    changes one gap, swaps the kinds of two, changes a few neighbors, or changes a stretch of gaps
    with the same structure. `allowed`: gap -> its allowed kinds, at least two, for the gaps that
    may change, in order of the trace. `alike`: groups of these gaps that have the same structure.
    The same seed gives the same walk. Do not use the evaluator elsewhere while it runs. Raises
    ValueError if no gap may change, or one has a single kind.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        allowed: Mapping[int, Sequence[int]],
        alike: Sequence[Sequence[int]],
        seed: int | np.random.SeedSequence,
    ) -> None:
        if not allowed or min(map(len, allowed.values())) < 2:  # noqa: PLR2004 - as it says
            raise ValueError("a walk needs gaps that may be of two kinds or more")
        self.evaluator, self.allowed = evaluator, allowed
        self._runner = evaluator.runner
        self._space = native(_table(allowed, alike))
        self._random = np.random.default_rng(seed)
        kinds = evaluator.default_kinds.copy()
        for gap, options in allowed.items():
            kinds[gap] = kinds[gap] if kinds[gap] in options else options[0]
        self.begin(kinds, math.inf)

    def begin(self, kinds: NDArray[np.int8], seconds: float) -> None:
        """Continue from `kinds`, whose step takes `seconds` (inf if they do not fit).

        Raises ValueError for kinds that are not allowed.
        """
        for gap, options in self.allowed.items():
            if kinds[gap] not in options:
                raise ValueError(f"gap {gap} is of kind {kinds[gap]}, allowed are {options}")
        self._kinds = self._given(np.array(kinds, np.int8))
        self._best = self._given(np.array(kinds, np.int8))
        self._hints = self._given(self.evaluator.no_hints)
        self._state = self._given(np.array([seconds, seconds, 0.0, 1.0, 0.0]))

    def go(
        self,
        steps: int,
        hot: float,
        cold: float,
        *,
        rows: float = 0.1,
        most_seconds: float = 0.0,
        watch: Callable[[float, float], object] | None = None,
    ) -> tuple[NDArray[np.int8], float]:
        """Take `steps` steps; returns the best kinds so far, and the seconds of their step.

        The temperature falls from `hot` to `cold`, in seconds. If `most_seconds` is above 0 and too
        short for all steps, it falls faster; results then vary between runs. `rows`: the fraction
        of the moves that change a stretch of gaps with the same structure. `watch` is called now
        and then with the fraction done and the best seconds so far. Raises ValueError if a
        temperature is not above 0 or they rise, and if `rows` is not a fraction.
        """
        if not 0 < cold <= hot < math.inf:
            raise ValueError(f"from {hot} to {cold} s: a walk cools down, to above 0")
        if not 0 <= rows < 1:
            raise ValueError(f"rows={rows}: a part of the changes")
        self._state[k.GROUP_MOVES] = rows
        start, done, progress = time.perf_counter(), 0, 0.0
        while done < steps and progress < 1:
            length = min(SHORT_CHUNK if most_seconds else CHUNK, steps - done)
            ahead = length / steps
            if most_seconds:
                spent = (time.perf_counter() - start) / most_seconds
                ahead = max(ahead, spent / done * length) if done else ahead
            self._state[k.HEAT] = hot * (cold / hot) ** progress
            self._state[k.COOLING] = (cold / hot) ** (ahead / length)
            draws = self._given(self._random.random(length * k.DRAWS))
            self._runner.walk(self._space, self._kinds, self._best, self._hints, self._state, draws)
            done, progress = done + length, progress + ahead
            if watch is not None:
                watch(min(1.0, progress), float(self._state[k.LEAST]))
        return np.array(self._best, np.int8), float(self._state[k.LEAST])

    def _given(self, array: NDArray[Any]) -> Any:
        """An array in the form that the kernel needs: a list if it is not compiled."""
        return array if self._runner.compiled else array.tolist()


def _table(
    allowed: Mapping[int, Sequence[int]], alike: Sequence[Sequence[int]]
) -> NDArray[np.int64]:
    """The allowed kinds and groups, as the space rows that `kernel.py` names."""
    places = {gap: place for place, gap in enumerate(allowed)}
    rows = {
        k.COUNTED: [len(places), len(alike), 0, 0],
        k.MOVABLE: list(places),
        k.OPTION_START: list(accumulate(map(len, allowed.values()), initial=0)),
        k.OPTIONS: list(chain.from_iterable(allowed.values())),
        k.GROUP_START: list(accumulate(map(len, alike), initial=0)),
        k.GROUP: [places[gap] for group in alike for gap in group],
    }
    table = np.zeros((k.SPACE_ROWS, max(map(len, rows.values()))), np.int64)
    for row, items in rows.items():
        table[row, : len(items)] = items
    return table
