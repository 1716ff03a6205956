"""Stopwatch: seconds per op over some steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from outcore.gauges import Clock, Moment
from outcore.ir.program import Program, Run

LATEST = 16
"""Runs of an op that are remembered: forward calls whose backward never runs may be many."""


@dataclass(slots=True)
class Stopwatch:
    """Takes a note per run of a program; gives the median per op over the steps noted."""

    program: Program
    clock: Clock
    notes: dict[int, deque[tuple[Moment, Moment]]] = field(default_factory=dict)
    """Op -> (start, stop), of the latest runs noted."""
    reruns: bool = False
    """Whether runs that make something again count too. They are the same kernels."""

    def note(self, position: int, start: Moment, stop: Moment) -> None:
        """Record that the run at body position `position` took from `start` to `stop`."""
        action = self.program.body[position].action
        if isinstance(action, Run) and (self.reruns or not action.again):
            self.notes.setdefault(action.op, deque(maxlen=LATEST)).append((start, stop))

    def seconds(self, ops: int) -> tuple[float, ...]:
        """Median seconds per op; 0 for one that was never noted."""
        return tuple(
            median(self.clock.seconds(start, stop) for start, stop in self.notes[op])
            if op in self.notes
            else 0.0
            for op in range(ops)
        )

    def last(self, op: int) -> tuple[int, int]:
        """Start and stop of the latest run of `op` on the host, in nanoseconds."""
        start, stop = self.notes[op][-1]
        return self.clock.wall_ns(start), self.clock.wall_ns(stop)
