"""Profiling: the first steps of a graph, under the floor program, and what they tell.

Two are checked against the trace and metered, the next are timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.execute import Driver, Executable, Instruments, build, checker
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Ref, Trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.session import Visit

READINGS = 2
"""Steps that are metered, of which the last one counts. In the first nothing is left of a step
before, and cuDNN may try algorithms out."""

TIMED_STEPS = 3
"""Steps that are timed, after those that are checked and metered."""


@dataclass(slots=True)
class Profiling:
    """The floor program's runs, and what they gave so far."""

    trace: Trace
    checked: Executable
    timed: Executable
    first: Stopwatch
    """Notes of the checked run, to place the meter's events."""
    stopwatch: Stopwatch
    readings_left: int = READINGS
    """Steps to be metered before one counts."""
    latest: Reading | None = None
    """That of the last step that was."""
    workspace_bytes: tuple[int, ...] | None = None
    between_bytes: int = 0
    """What the rest of the step takes at most while the graph waits, beyond what is held besides
    the graph when backward begins, and the tangents."""
    resident_bytes: int = 0
    """The most that was held besides the graph's own buffers when a forward call began."""
    early_bytes: int = 0
    """The same of calls that came to their backward, and beside which no other waited."""
    late_bytes: int = 0
    """The most that was held besides the graph's own buffers when that began."""
    alone: bool = True
    """Whether all calls were such."""
    lingering_bytes: int = 0
    """What the metered step held more of when backward began, the tangents left out."""
    timed_steps: int = 0

    @property
    def done(self) -> bool:
        """Whether there is enough to plan from."""
        return self.workspace_bytes is not None and self.timed_steps >= TIMED_STEPS

    @property
    def executable(self) -> Executable:
        """What the next step runs."""
        return self.checked if self.workspace_bytes is None else self.timed

    @property
    def tangent_bytes(self) -> int:
        """What the backward call is given."""
        buffers = self.trace.value_buffers(tuple(map(Ref, self.trace.tangents)))
        return sum(self.trace.buffers[b].nbytes for b in buffers)

    @property
    def more_bytes(self) -> int:
        """By how much more is held besides the graph when backward begins than at the beginning.

        Less than 0 where what is left of the step before goes in between: its results, which have a
        name until the next have it, or its gradients.
        """
        lingering = self.late_bytes - self.early_bytes if self.alone else self.lingering_bytes
        return max(-self.resident_bytes, lingering)

    def waited(self, visit: Visit, level_bytes: int | None) -> None:
        """Take what is held, everything counted, as the backward call of a visit begins."""
        if level_bytes is None or visit.level_bytes is None:
            self.alone = False
            return
        lingering = level_bytes - visit.level_bytes - self.tangent_bytes
        self.early_bytes = max(self.early_bytes, visit.resident_bytes)
        self.late_bytes = max(self.late_bytes, visit.resident_bytes + lingering)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces, and what the rest of the step needs between the two calls."""
        if self.workspace_bytes is not None:
            return
        if reading is not self.latest:
            self.latest, self.readings_left = reading, self.readings_left - 1
        if self.readings_left > 0:
            return
        spans = (self.first.last(op) for op in range(len(self.trace.ops)))
        self.workspace_bytes = tuple(reading.workspace_bytes(a, b) for a, b in spans)
        waiting = reading.level_bytes(visit.forward_stop) + self.tangent_bytes
        lingering = reading.level_bytes(visit.backward_start) - waiting
        peak = reading.peak_bytes(visit.forward_stop, visit.backward_start)
        self.lingering_bytes = max(0, lingering)
        held = max(-visit.resident_bytes, lingering) if self.alone else self.lingering_bytes
        self.between_bytes = max(0, peak - waiting - held)

    def profile(self) -> Profile:
        """What was measured, once it is done."""
        assert self.workspace_bytes is not None  # noqa: S101 - `done` says so
        seconds = self.stopwatch.seconds(len(self.trace.ops))
        return Profile(seconds, self.workspace_bytes, Source.MEASURED)


def begin_profiling(trace: Trace, program: Program, driver: Driver) -> Profiling:
    """Build the floor program with its instruments."""
    clock, generator = driver.clock, driver.generator
    first, stopwatch = Stopwatch(program, clock), Stopwatch(program, clock)
    timed = Instruments(timed=True)
    both = Instruments(timed=True, checked=True)
    return Profiling(
        trace,
        build(trace, program, generator, both, first.note, checker(trace), clock.now),
        build(trace, program, generator, timed, stopwatch.note, clock=clock.now),
        first,
        stopwatch,
    )
