"""runner: the compiled kernel and its tables, enlarged if a plan needs more room."""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate.kernel import COUNTED, DONE, FULL, STEP, run, walk
from outcore.evaluate.tables import tables
from outcore.ir.liveness import Liveness
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem
from outcore.jit import COMPILED, Ints, native


class KernelRunner:
    """Runs the kernel for one problem. `gaps` are the gaps that a plan may decide on."""

    compiled = COMPILED

    def __init__(self, problem: Problem, live: Liveness, gaps: Sequence[Gap]) -> None:
        self.problem, self.live, self.gaps = problem, live, gaps
        self.space = 4
        self._make_tables()

    def _make_tables(self) -> None:
        table, times = tables(self.problem, self.live, self.gaps, self.space)
        self.table, self.times = native(table), native(times)

    def run(
        self,
        kinds: NDArray[np.int8],
        release: NDArray[np.int64],
        prefetch: NDArray[np.int64],
        limit: float = math.inf,
    ) -> tuple[float, int, int] | None:
        """Seconds, bytes on the device, bytes in the outer tier; None if it cannot be carried out.

        With a finite `limit` in seconds, also None for a plan that takes longer or does not fit.
        The problem does not bound the number of reruns, so the tables are doubled when full.
        """
        arrays = kinds, release, prefetch
        given: Any = arrays if COMPILED else [array.tolist() for array in arrays]
        return self._run(given[0], given[1], given[2], limit)

    def _run(
        self, kinds: Sequence[int], release: Sequence[int], prefetch: Sequence[int], limit: float
    ) -> tuple[float, int, int] | None:
        found = run(self.table, self.times, kinds, release, prefetch, limit)
        while found[0] == FULL:
            self._grow()
            found = run(self.table, self.times, kinds, release, prefetch, limit)
        return found[1:] if found[0] == DONE else None

    def walk(
        self,
        space: Ints,
        kinds: MutableSequence[int],
        best: MutableSequence[int],
        hints: Sequence[int],
        state: MutableSequence[float],
        draws: Sequence[float],
    ) -> None:
        """Take all the steps that `draws` has numbers for, by `kernel.walk`."""
        space[COUNTED, STEP] = 0
        while walk(self.table, self.times, space, kinds, best, hints, state, draws) == FULL:
            self._grow()

    def _grow(self) -> None:
        self.space *= 2
        self._make_tables()
