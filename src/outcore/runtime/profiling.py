"""Profiling: the first steps of a graph, under the floor program, and what they tell.

One step (on a GPU two) is checked against the trace and metered, the next are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outcore.capture import Captured
from outcore.execute import Driver, Executable, Instruments, build, checker
from outcore.gauges import Moment
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Ref, Trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.calls import nbytes_of
from outcore.runtime.session import Visit

TIMED_STEPS = 3
"""Steps that are timed, after those that are checked and metered."""


@dataclass(slots=True)
class Keeping:
    """A program that moves little or nothing, for calls that nobody differentiates."""

    executable: Executable
    most_resident_bytes: int
    """What may be held besides the graph's own buffers as a call begins."""
    most_allocated_bytes: int = -1
    """What the allocator may have given out then, for as much as that to be held."""


@dataclass(slots=True)
class Profiling:
    """The floor program's runs, and what they gave so far."""

    trace: Trace
    within: Mapping[int, int]
    """Ops that run graphs of their own, and what these hold at least; not all may run."""
    checked: Executable
    timed: Executable
    first: Stopwatch
    """Notes of the checked run, to place the meter's events."""
    stopwatch: Stopwatch
    most_resident_bytes: int
    """What may be held besides the graph's own buffers while the program fits the budget."""
    readings_left: int
    """Steps to be metered before one counts."""
    latest: Reading | None = None
    """That of the last step that was."""
    workspace_bytes: tuple[int, ...] | None = None
    between_bytes: int = 0
    """What the rest of the step takes at most while the graph waits, beyond `lingering_bytes` and
    the tangents."""
    lingering_bytes: int = 0
    """What the rest of the step still holds when backward begins, the tangents left out."""
    base_bytes: int | None = None
    """The most that was held as the first call of a timed step began, but for the graph's own
    buffers and what waiting calls alone held. None: none began yet."""
    first_bytes: int = 0
    """The same of the latest step."""
    wants_pause: bool = True
    """Whether a timed step is to be metered for them: in one that is checked, what calls are given
    is held until they come back."""
    gone: frozenset[int] = frozenset()
    """Buffers that timed calls were given or returned, and that nobody held when one came back."""
    gone_bytes: int | None = None
    """What went while the graph waited, in each timed step, and was not of that step itself;
    None: not known."""
    timed_steps: int = 0
    keeping: Keeping | None = None
    """Once nobody differentiates."""

    @property
    def done(self) -> bool:
        """Whether there is enough to plan from."""
        return self.workspace_bytes is not None and self.timed_steps >= TIMED_STEPS

    @property
    def executable(self) -> Executable:
        """What the next step runs."""
        return self.checked if self.workspace_bytes is None else self.timed

    @property
    def times_pause(self) -> bool:
        """Whether steps are timed by now, and one is to be metered."""
        return self.workspace_bytes is not None and self.wants_pause

    def again(self) -> None:
        """Time steps anew: others hold less from now on."""
        self.timed_steps, self.base_bytes, self.wants_pause = 0, None, True

    def began(self, base_bytes: int, *, first: bool) -> int:
        """Take what was held as a timed call began; how much more than at the first of its step."""
        if first or self.base_bytes is None:
            known = base_bytes if self.base_bytes is None else self.base_bytes
            self.base_bytes, self.first_bytes = max(known, base_bytes), base_bytes
        return base_bytes - self.first_bytes

    def waited(self, gone_bytes: int) -> None:
        """Take what went while a visit waited."""
        before = gone_bytes if self.gone_bytes is None else self.gone_bytes
        self.gone_bytes = min(gone_bytes, before)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces, or what the rest of the step needs between the two calls."""
        if self.workspace_bytes is not None:
            if visit.call_tensors is not None and self.wants_pause:  # a timed one
                self.wants_pause = False
                self._take_pause(reading, visit)
            return
        if len(self.first.notes) < len(self.trace.ops):
            return  # it was another program's
        if reading is not self.latest:
            self.latest, self.readings_left = reading, self.readings_left - 1
        if self.readings_left > 0:
            return
        spans = (self.first.last(op) for op in range(len(self.trace.ops)))
        observed = (reading.workspace_bytes(a, b) for a, b in spans)
        self.workspace_bytes = tuple(max(n, self.within.get(i, 0)) for i, n in enumerate(observed))
        self._take_pause(reading, visit)

    def _take_pause(self, reading: Reading, visit: Visit) -> None:
        tangents = nbytes_of(self.trace, tuple(map(Ref, self.trace.tangents)))
        waiting = reading.level_bytes(visit.forward_stop)
        lingering = reading.level_bytes(visit.backward_start) - waiting - tangents
        peak = reading.peak_bytes(visit.forward_stop, visit.backward_start)
        self.lingering_bytes = max(0, lingering)
        self.between_bytes = max(0, peak - waiting - self.lingering_bytes - tangents)

    def profile(self) -> Profile:
        """What was measured, once it is done."""
        assert self.workspace_bytes is not None  # noqa: S101 - `done` says so
        seconds = self.stopwatch.seconds(len(self.trace.ops))
        return Profile(seconds, self.workspace_bytes, Source.MEASURED)


def begin_profiling(
    captured: Captured,
    program: Program,
    most_resident_bytes: int,
    driver: Driver,
    readings: int,
    mark: Callable[[], object],
) -> Profiling:
    """Build the floor program with its instruments; `readings` steps of it are to be metered.

    `mark` is called where the meter will be asked for a time: as each op begins and ends.
    """
    clock, generator = driver.clock, driver.generator
    trace = captured.trace
    first, stopwatch = Stopwatch(program, clock), Stopwatch(program, clock)
    timed = Instruments(timed=True)
    both = Instruments(timed=True, checked=True)

    def marked() -> Moment:
        mark()
        return clock.now()

    return Profiling(
        trace,
        captured.within,
        build(trace, program, generator, both, first.note, checker(trace), marked),
        build(trace, program, generator, timed, stopwatch.note, clock=clock.now),
        first,
        stopwatch,
        most_resident_bytes,
        readings,
    )
