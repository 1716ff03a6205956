"""Engine: the kernel and its tables, which grow where a plan needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate.compiled import COMPILED, native
from outcore.evaluate.kernel import DONE, FULL, run
from outcore.evaluate.tables import tables
from outcore.ir.liveness import Liveness
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem


class Engine:
    """Runs the kernel over tables for one problem, whose gaps are `gaps`."""

    compiled = COMPILED

    def __init__(self, problem: Problem, live: Liveness, gaps: Sequence[Gap]) -> None:
        self.problem, self.live, self.gaps = problem, live, gaps
        self.space = 4
        self._make_tables()

    def _make_tables(self) -> None:
        table, times = tables(self.problem, self.live, self.gaps, self.space)
        self.table, self.times = native(table), native(times)

    def run(
        self, kinds: NDArray[np.int8], release: NDArray[np.int64], prefetch: NDArray[np.int64]
    ) -> tuple[float, int, int] | None:
        """Seconds, bytes on the device and in the outer tier; None for what cannot be done.

        Runs again are not bounded by the problem; the tables get twice as long where need be.
        """
        arrays = kinds, release, prefetch
        plan = arrays if COMPILED else tuple(array.tolist() for array in arrays)
        found = run(self.table, self.times, *plan)
        while found[0] == FULL:
            self.space *= 2
            self._make_tables()
            found = run(self.table, self.times, *plan)
        return found[1:] if found[0] == DONE else None
