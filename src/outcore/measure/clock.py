"""Stopwatch: the seconds of each op, over several steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from outcore.gauges import Clock, Moment
from outcore.ir.program import Program, Run

LATEST = 16
"""The most runs of an op to remember: there may be many forward calls whose backward never runs."""


@dataclass(slots=True)
class Stopwatch:
    """Notes each run of a program, and returns the median time per op over the noted steps."""

    program: Program
    """The program whose runs are noted."""
    clock: Clock
    """The driver's clock, which gave the moments."""
    notes: dict[int, deque[tuple[Moment, Moment]]] = field(default_factory=dict)
    """Op -> (start, stop) of its latest noted runs."""
    reruns: bool = False
    """Whether recomputations count, too. They run the same kernels."""
    _medians: tuple[float, ...] | None = field(default=None, init=False)
    """Cache for `seconds`; None after a note."""

    def note(self, position: int, start: Moment, stop: Moment) -> None:
        """Note that the run at body position `position` took from `start` to `stop`."""
        action = self.program.body[position].action
        if isinstance(action, Run) and (self.reruns or not action.again):
            self.notes.setdefault(action.op, deque(maxlen=LATEST)).append((start, stop))
            self._medians = None

    def seconds(self, ops: int) -> tuple[float, ...]:
        """Median seconds of each op; 0 for an op that was never noted."""
        if self._medians is None or len(self._medians) != ops:
            self._medians = tuple(
                median(self.clock.seconds(start, stop) for start, stop in self.notes[op])
                if op in self.notes
                else 0.0
                for op in range(ops)
            )
        return self._medians

    def last(self, op: int) -> tuple[int, int]:
        """Start and stop of the latest run of `op` on the host, in nanoseconds."""
        start, stop = self.notes[op][-1]
        return self.clock.wall_ns(start), self.clock.wall_ns(stop)
