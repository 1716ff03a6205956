"""Profiling: measures a graph in its first steps, which run the floor program.

If the same graph has a plan for larger sizes, they run that, and are fewer.

One step (two on a GPU) is checked against the trace and metered; the next ones are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from outcore.capture import Captured
from outcore.execute import Driver, Executable, Instruments, build, checker
from outcore.gauges import Moment
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Phase, Ref, Trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.graphs.calls import nbytes_of
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.step.visit import Visit

TIMED_STEPS = 3
"""Timed calls (forward and backward) before planning, after those that are checked and metered.
A graph that is called several times in a step needs fewer steps."""

MANY_SIZES = 3
"""If a graph has come with so many other sizes, each of them is timed only once: it is not known
when it will come again."""


@dataclass(slots=True)
class Keeping:
    """A program for a graph that nobody differentiates.

    It keeps everything, or recomputes what does not fit (`Programs.forward_only`).
    """

    executable: Executable
    checked: bool
    """Whether backward compares results with the trace: none of the graph has done so before."""
    most_resident_bytes: int
    """The most external bytes as a call begins with which the program may run."""
    most_allocated_bytes: int = -1
    """Allocated bytes as a call begins up to which external memory is known to be within
    `most_resident_bytes`. -1: not known."""


@dataclass(slots=True)
class Profiling:
    """What the profiled steps run, and what was measured so far."""

    trace: Trace
    within: Mapping[int, int]
    """Op that runs inner graphs, such as the branches of a condition -> the least bytes of its
    workspace. A step may not run all of them, so the meter may see less."""
    program: Program
    """What profiled steps run."""
    checked: Executable
    """The program with timers, which checks each op against the trace."""
    make_timed: Callable[[], Executable]
    """Makes the program with timers only. Called when the first step is to be timed."""
    first: Stopwatch
    """Times of ops in checked steps, by which the meter's events are assigned to ops."""
    stopwatch: Stopwatch
    """Times of ops in timed steps."""
    most_resident_bytes: int
    """The most external bytes with which the program fits the budget."""
    lent: Planned | None
    """The plan for larger sizes that profiled steps run instead of the floor program; None if they
    run that or keep everything (`keeps`). With it, times are estimated, and no steps are timed."""
    readings_left: int
    """Metered steps until one counts, that one included."""
    latest: Reading | None = None
    """The reading of the latest metered step."""
    workspace_bytes: tuple[int, ...] | None = None
    """Metered workspace of each op. None until a metered step counts."""
    checked_workspace_bytes: tuple[int, ...] | None = None
    """The same by the latest metered step, whether it counts or not. None: there was none."""
    checked_base_bytes: int = 0
    """The most external bytes as the first call of a checked step began."""
    between_bytes: int = 0
    """The most that the rest of the step needs while the graph waits, beyond `lingering_bytes` and
    the tangents."""
    lingering_bytes: int = 0
    """What the rest of the step still holds when backward begins, without the tangents."""
    base_bytes: int | None = None
    """The most external bytes as the first call of a timed step began, without what waiting calls
    alone held. Calls whose results were dropped do not count. None: no timed step yet."""
    first_bytes: int = 0
    """The same for the latest timed step alone."""
    dropped_base_bytes: int = 0
    """`base_bytes` for calls whose results were dropped: they did not come back."""
    returned: bool = True
    """Whether a call of the latest timed step has come back, or none has begun."""
    wants_pause: bool = True
    """Whether `between_bytes` and `lingering_bytes` are still to be metered in a timed step. Those
    from a checked step are too high: it holds the inputs of calls until the calls come back."""
    gone: frozenset[int] = frozenset()
    """Buffers that timed calls were given or returned, and that nothing held any more when one of
    these calls came back."""
    left_over_bytes: int | None = None
    """Bytes that were freed in each timed step while the graph waited and were not part of that
    step: the least of the steps. None: not known."""
    enough_steps: int = TIMED_STEPS
    """Timed calls after which the graph is planned."""
    timed: Executable | None = None
    """The result of `make_timed`; None before."""
    early: bool = False
    """Whether it is made by `from_checks`."""
    timed_steps: int = 0
    """Timed backward calls so far, since `again` if that was called: several in a step if the graph
    is called several times."""
    keeps: bool = False
    """Whether the program keeps everything because there is plenty of room
    (`Plans.most_beside_all`)."""
    keeping: Keeping | None = None
    """What runs once nobody differentiates the graph; None before."""

    @property
    def done(self) -> bool:
        """Whether enough was measured to plan."""
        timed = self.lent is not None or self.timed_steps >= self.enough_steps
        return self.workspace_bytes is not None and timed

    @property
    def executable(self) -> Executable:
        """What the next profiled step runs."""
        if not self.times:
            return self.checked
        self.timed = self.timed or self.make_timed()
        return self.timed

    def checks(self, executable: Executable) -> bool:
        """Whether `executable` compares the trace with what kernels really return."""
        if self.keeping is not None and executable is self.keeping.executable:
            return self.keeping.checked
        return executable is self.checked

    @property
    def times(self) -> bool:
        """Whether steps are timed by now; before, they are checked."""
        return self.workspace_bytes is not None

    @property
    def times_pause(self) -> bool:
        """Whether steps are timed by now, and one of them is to be metered."""
        return self.times and self.wants_pause

    def again(self) -> None:
        """Time steps again, because other graphs hold less from now on."""
        self.timed_steps, self.base_bytes, self.wants_pause = 0, None, True
        self.dropped_base_bytes, self.returned = 0, True

    def began(self, base_bytes: int, *, first: bool) -> int:
        """Note `base_bytes` as a timed call begins; the excess over the first call of its step."""
        if first and not self.returned:  # the call before it is not outstanding either
            self.dropped_base_bytes = max(self.dropped_base_bytes, self.first_bytes)
        if first or (self.base_bytes is None and self.returned):
            self.first_bytes, self.returned = base_bytes, False
        return base_bytes - self.first_bytes

    @property
    def open_base_bytes(self) -> int:
        """`base_bytes` for the latest call, if it has neither come back nor was seen dropped."""
        return 0 if self.returned else self.first_bytes

    def came_back(self) -> None:
        """Note that a timed call has come back."""
        self.base_bytes = max(self.base_bytes or 0, self.first_bytes)
        self.returned = True

    def checking(self, base_bytes: int) -> None:
        """Note the external memory as the first call of a checked step begins."""
        self.checked_base_bytes = max(self.checked_base_bytes, base_bytes)

    def from_checks(self, base_bytes: int = 0) -> Profiling:
        """What is known already, for a plan before enough steps are timed.

        Call it once `checked_workspace_bytes` is known. `base_bytes`: external memory now.
        """
        timed = self.timed_steps > 0
        return replace(
            self,
            workspace_bytes=self.workspace_bytes or self.checked_workspace_bytes,
            stopwatch=self.stopwatch if timed else self.first,
            base_bytes=max(self.base_bytes or 0, self.checked_base_bytes, base_bytes),
            early=True,
        )

    def waited(self, left_over_bytes: int) -> None:
        """Note the bytes freed while the graph waited in one timed step."""
        before = left_over_bytes if self.left_over_bytes is None else self.left_over_bytes
        self.left_over_bytes = min(left_over_bytes, before)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces from a checked step, and what was held between the two calls."""
        if self.workspace_bytes is not None:
            if visit.call_tensors is not None and self.wants_pause:  # a timed one
                self.wants_pause = False
                self._take_pause(reading, visit)
            return
        if visit.ran is not self.checked:
            return
        if reading is not self.latest:
            self.latest, self.readings_left = reading, self.readings_left - 1
        spans = (self.first.last(op) for op in range(len(self.trace.ops)))
        observed = (reading.workspace_bytes(a, b) for a, b in spans)
        checked = tuple(max(n, self.within.get(i, 0)) for i, n in enumerate(observed))
        self.checked_workspace_bytes = checked
        self._take_pause(reading, visit)
        if self.readings_left <= 0:
            self.workspace_bytes = checked

    def _take_pause(self, reading: Reading, visit: Visit) -> None:
        tangents = nbytes_of(self.trace, tuple(map(Ref, self.trace.tangents)))
        waiting = reading.level_bytes(visit.forward_stop)
        level = reading.level_bytes(visit.backward_start) + visit.away_bytes
        lingering = level - waiting - tangents
        peak = reading.peak_bytes(visit.forward_stop, visit.backward_start)
        peak += max(0, visit.away_bytes)
        self.lingering_bytes = max(0, lingering)
        self.between_bytes = max(0, peak - waiting - self.lingering_bytes - tangents)

    def profile(self) -> Profile:
        """The measured profile. Call it once `done` is true."""
        assert self.workspace_bytes is not None  # noqa: S101 - `done` says so
        if self.lent is not None:
            return replace(self.lent.problem.profile, workspace_bytes=self.workspace_bytes)
        seconds = self.stopwatch.seconds(len(self.trace.ops))
        return Profile(seconds, self.workspace_bytes, Source.MEASURED)


def begin_profiling(
    captured: Captured,
    program: Program,
    most_resident_bytes: int,
    driver: Driver,
    readings: int,
    mark: Callable[[], int],
    lent: Planned | None,
) -> Profiling:
    """Build `program` with its instruments; `readings` of its steps are to be metered.

    `program` is the floor program, the one that keeps everything, or that of the plan `lent`.

    `mark` is called as each op begins and ends, and returns the time for which the meter is read.
    """
    clock, generator = driver.clock, driver.generator
    trace = captured.trace
    first, stopwatch = Stopwatch(program, clock), Stopwatch(program, clock)
    timed = Instruments(timed=True)
    both = Instruments(timed=True, checked=(*Phase,))

    def marked() -> Moment:
        return clock.at(mark())

    return Profiling(
        trace,
        captured.within,
        program,
        build(trace, program, generator, both, first.note, checker(trace), marked),
        partial(build, trace, program, generator, timed, stopwatch.note, clock=clock.now),
        first,
        stopwatch,
        most_resident_bytes,
        lent,
        readings,
    )


def begin_keeping(
    captured: Captured,
    program: Program,
    most_resident_bytes: int,
    driver: Driver,
    *,
    checked: bool,
) -> Keeping:
    """Build `program`, which may run beside `most_resident_bytes` of external memory."""
    trace, instruments = captured.trace, Instruments(checked=(Phase.BACKWARD,) * checked)
    executable = build(trace, program, driver.generator, instruments, check=checker(trace))
    return Keeping(executable, checked, most_resident_bytes)
