"""trial: time a planned program for some steps, to plan again from the measured times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from weakref import ref

from outcore.execute import Driver, Executable, Instruments, build
from outcore.execute.driver import CopySpan
from outcore.ir.hardware import Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Source
from outcore.ir.trace import Trace
from outcore.measure import Stopwatch
from outcore.runtime.graphs.drift import Copies, Drift, Way, as_measured
from outcore.runtime.graphs.planned import Planned

TRIAL_STEPS = 3
"""Timed steps (a forward call and its backward call each) before the graph is planned again."""

LONGEST_TRIAL = 256
"""Steps after which a trial is ended: its graph may not run any more."""

TRIAL_COPIES = 4096
"""Copies that are remembered at most: a trial may take long to end."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Trial:
    """Some timed steps of `planned`, whose time was off by `drift`."""

    planned: Planned
    drift: Drift
    executable: Executable
    """The program of the plan, with timers."""
    stopwatch: Stopwatch
    began: int
    """Number of the engine's step in which the trial began."""
    copies: deque[CopySpan] = field(default_factory=lambda: deque(maxlen=TRIAL_COPIES))
    """Copies of the driver since then, those of other graphs too: they use the same links."""
    steps: int = 0

    @property
    def done(self) -> bool:
        """Whether enough was measured to plan again."""
        return self.steps >= TRIAL_STEPS

    def problem(self) -> Problem:
        """The problem of the plan, with measured seconds per op and measured links."""
        problem, hardware = self.planned.problem, self.planned.problem.hardware
        seconds = self.stopwatch.seconds(len(problem.trace.ops))
        profile = replace(problem.profile, seconds=seconds, source=Source.MEASURED)
        links = as_measured(hardware, self._by_way(hardware.outer))
        return replace(problem, profile=profile, hardware=links)

    def _by_way(self, outer: Tier) -> dict[Way, Copies]:
        """The measured copies in each direction over the link next to the device.

        Of copies to a disk beyond the host, drivers report only that part; copies from it are not
        reported.
        """

        def pairs(direction: str) -> Copies:
            spans = (span for span in self.copies if span.direction == direction)
            return [(span.nbytes, span.stop_seconds - span.start_seconds) for span in spans]

        return {(Tier.DEVICE, outer): pairs("out"), (outer, Tier.DEVICE): pairs("in")}


class Trials:
    """Begins and ends trials, one at a time: a driver reports its copies to one receiver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._current: ref[Trial] | None = None
        """The trial under way. Its graph holds it."""

    @property
    def busy(self) -> bool:
        """Whether a trial is under way."""
        return self._current is not None

    def hears(self, trial: Trial) -> bool:
        """Whether `trial` is the one under way."""
        return self._current is not None and self._current() is trial

    def begin(self, trace: Trace, planned: Planned, drift: Drift, step: int) -> Trial:
        """Build the program of `planned` with timers. No other trial may be under way."""
        clock = self.driver.clock
        stopwatch = Stopwatch(planned.program, clock, reruns=True)
        timed = Instruments(timed=True)
        executable = build(
            trace,
            planned.program,
            self.driver.generator,
            timed,
            stopwatch.note,
            clock=clock.now,
            layout=planned.layout,
        )
        trial = Trial(planned, drift, executable, stopwatch, step)
        self.driver.record(trial.copies.append)
        self._current = ref(trial)
        return trial

    def end(self, trial: Trial | None) -> None:
        """End `trial`, if it is the one under way."""
        if trial is not None and self.hears(trial):
            self._stop()

    def check(self, step: int) -> None:
        """End a trial whose graph is gone, or that has taken more than `LONGEST_TRIAL` steps."""
        if self._current is None:
            return
        trial = self._current()
        if trial is None or step - trial.began > LONGEST_TRIAL:
            self._stop()

    def _stop(self) -> None:
        self._current = None
        self.driver.record(None)
