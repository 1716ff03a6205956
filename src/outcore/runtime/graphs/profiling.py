"""Profiling: measures a graph in its first steps, which run the floor program.

If the same graph has a plan for larger sizes, they run that, and are fewer.

One step (two on a GPU) is checked against the trace and metered; the next ones are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from outcore.capture import Captured
from outcore.execute import Driver, Executable, Instruments, build, checker
from outcore.gauges import Moment
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Phase, Trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.shown import CheckedSteps, Shown, TimedSteps, Waiting
from outcore.runtime.step.visit import Visit

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
    """What the profiled steps of a graph run, and what they have shown so far."""

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
    most_resident_bytes: int
    """The most external bytes with which the program fits the budget."""
    lent: Planned | None
    """The plan for larger sizes that profiled steps run instead of the floor program; None if they
    run that or keep everything (`keeps`). With it, times are estimated, and no steps are timed."""
    checks: CheckedSteps
    timings: TimedSteps
    waiting: Waiting = field(default_factory=Waiting)
    timed: Executable | None = None
    """The result of `make_timed`; None before."""
    roomy: bool = False
    """Whether `most_resident_bytes` leaves room for the metered workspaces."""
    keeps: bool = False
    """Whether the program keeps everything because there is plenty of room
    (`Plans.most_beside_all`)."""
    keeping: Keeping | None = None
    """What runs once nobody differentiates the graph; None before."""

    @property
    def done(self) -> bool:
        """Whether enough was measured to plan."""
        return self.times and (self.lent is not None or self.timings.done)

    @property
    def times(self) -> bool:
        """Whether steps are timed by now; before, they are checked."""
        return self.checks.done

    @property
    def times_pause(self) -> bool:
        """Whether steps are timed by now, and one of them is to be metered."""
        return self.times and self.waiting.wanted

    @property
    def executable(self) -> Executable:
        """What the next profiled step runs."""
        if not self.times:
            return self.checked
        self.timed = self.timed or self.make_timed()
        return self.timed

    def compares(self, executable: Executable) -> bool:
        """Whether `executable` compares the trace with what kernels really return."""
        if self.keeping is not None and executable is self.keeping.executable:
            return self.keeping.checked
        return executable is self.checked

    def go_on_from(self, before: Profiling) -> None:
        """Check no more steps, if those of `before`, another program of the trace, are enough.

        The call that begins may be noted in `before` already.
        """
        if before.times and before.trace is self.trace:
            self.checks, self.waiting = before.checks, replace(before.waiting, wanted=True)
            self.timings.latest_base_bytes = before.timings.latest_base_bytes
            self.timings.returned = before.timings.returned

    def again(self) -> None:
        """Time steps again, because other graphs hold less from now on."""
        self.timings.again()
        self.waiting.wanted = True

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces from a checked step, and what was held between the two calls."""
        if not self.times:
            if visit.ran is self.checked:
                self.checks.metered(reading, len(self.trace.ops), self.within)
                self.waiting.metered(reading, visit, self.trace)
        elif visit.call_tensors is not None and self.waiting.wanted:  # a timed one
            self.waiting.wanted = False
            self.waiting.metered(reading, visit, self.trace)

    def shown(self) -> Shown:
        """What the steps have shown. Call it once `done` is true."""
        return self._shown(self.timings.stopwatch, self.timings.base_bytes or 0, early=False)

    def shown_early(self) -> Shown | None:
        """What is known before enough steps are timed. None: no step was metered yet."""
        if self.checks.workspace_bytes is None:
            return None
        stopwatch = self.timings.stopwatch if self.timings.number else self.checks.stopwatch
        base_bytes = max(self.timings.base_bytes or 0, self.checks.base_bytes)
        return self._shown(stopwatch, base_bytes, early=True)

    def _shown(self, stopwatch: Stopwatch, base_bytes: int, *, early: bool) -> Shown:
        timings, waiting, workspaces = self.timings, self.waiting, self.checks.workspace_bytes
        assert workspaces is not None  # noqa: S101 - a step was metered
        if self.lent is not None:
            profile = replace(self.lent.problem.profile, workspace_bytes=workspaces)
        else:
            seconds = stopwatch.seconds(len(self.trace.ops))
            profile = Profile(seconds, workspaces, Source.MEASURED)
        return Shown(
            profile,
            self.program,
            self.keeps,
            base_bytes,
            timings.dropped_base_bytes,
            timings.open_base_bytes,
            waiting.between_bytes,
            waiting.lingering_bytes,
            timings.gone,
            early,
        )


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
        most_resident_bytes,
        lent,
        CheckedSteps(first, readings),
        TimedSteps(stopwatch),
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
