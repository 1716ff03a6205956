"""shown: what the profiled steps of a graph have shown, kind by kind, and all that a plan needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.trace import Trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.graphs.calls import gradient_bytes, tangent_bytes
from outcore.runtime.step.visit import Visit

TIMED_STEPS = 3
"""Timed calls (forward and backward) before planning, after those that are checked and metered.
A graph that is called several times in a step needs fewer steps."""


@dataclass(slots=True)
class CheckedSteps:
    """What steps that are checked against the trace and metered have shown: workspaces."""

    stopwatch: Stopwatch
    """Times of ops, by which the meter's events are assigned to ops."""
    readings_left: int
    """Metered steps until one counts, that one included."""
    workspace_bytes: tuple[int, ...] | None = None
    """Workspace of each op by the latest metered step, whether it counts or not. None: there was
    none."""
    base_bytes: int = 0
    """The most external bytes as the first call of a step began."""
    latest: Reading | None = None
    """The reading of the latest metered step."""

    @property
    def done(self) -> bool:
        """Whether a metered step has counted: `workspace_bytes` are those of the graph."""
        return self.workspace_bytes is not None and self.readings_left <= 0

    def began(self, base_bytes: int) -> None:
        """Note the external memory as the first call of a step begins."""
        self.base_bytes = max(self.base_bytes, base_bytes)

    def metered(self, reading: Reading, ops: int, within: Mapping[int, int]) -> None:
        """Take the workspaces of the `ops` ops of a step that was metered.

        `within`: as `Captured.within`.
        """
        if reading is not self.latest:
            self.latest, self.readings_left = reading, self.readings_left - 1
        spans = map(self.stopwatch.last, range(ops))
        observed = (reading.workspace_bytes(start, stop) for start, stop in spans)
        self.workspace_bytes = tuple(max(n, within.get(op, 0)) for op, n in enumerate(observed))


@dataclass(slots=True)
class TimedSteps:
    """What timed steps have shown: the times of ops, and external memory.

    Calls whose results were dropped do not come back. What was held beside those counts apart.
    """

    stopwatch: Stopwatch
    enough: int = TIMED_STEPS
    """Backward calls after which the graph is planned."""
    number: int = 0
    """Backward calls so far, since `again` if that was called: several in a step if the graph is
    called several times."""
    base_bytes: int | None = None
    """The most external bytes as the first call of a step began, without what waiting calls alone
    held. None: no call has come back yet."""
    latest_base_bytes: int = 0
    """The same for the latest step alone."""
    dropped_base_bytes: int = 0
    """`base_bytes` for calls whose results were dropped."""
    returned: bool = True
    """Whether a call of the latest step has come back, or none has begun."""
    gone: frozenset[int] = frozenset()
    """Buffers that calls were given or returned, and that nothing held any more when one of these
    calls came back."""
    left_over_bytes: int | None = None
    """Bytes that were freed in each step while the graph waited and were not part of that step: the
    least of the steps. None: not known."""

    @property
    def done(self) -> bool:
        """Whether enough steps were timed."""
        return self.number >= self.enough

    @property
    def open_base_bytes(self) -> int:
        """`base_bytes` for the latest call, if it has neither come back nor was seen dropped."""
        return 0 if self.returned else self.latest_base_bytes

    def began(self, base_bytes: int, *, first: bool) -> int:
        """Note `base_bytes` as a call begins; the excess over the first call of its step."""
        if first and not self.returned:  # the call before it is not outstanding either
            self.dropped_base_bytes = max(self.dropped_base_bytes, self.latest_base_bytes)
        if first or (self.base_bytes is None and self.returned):
            self.latest_base_bytes, self.returned = base_bytes, False
        return base_bytes - self.latest_base_bytes

    def came_back(self, gone: frozenset[int]) -> None:
        """Note that a call has come back, when nothing else held the buffers `gone`."""
        self.base_bytes = max(self.base_bytes or 0, self.latest_base_bytes)
        self.returned = True
        self.gone |= gone

    def waited(self, left_over_bytes: int) -> None:
        """Note the bytes freed while the graph waited in one step."""
        before = left_over_bytes if self.left_over_bytes is None else self.left_over_bytes
        self.left_over_bytes = min(left_over_bytes, before)

    def again(self) -> None:
        """Time steps again, because other graphs hold less from now on."""
        self.number, self.base_bytes = 0, None
        self.dropped_base_bytes, self.returned = 0, True


@dataclass(slots=True)
class Waiting:
    """What the rest of a step held and needed while the graph waited, as metered.

    If a call came back several times (`retain_graph`), these are the most of all its waits, without
    the gradients that its earlier backward calls left.
    """

    between_bytes: int = 0
    """The most that was needed, beyond `lingering_bytes` and the tangents."""
    lingering_bytes: int = 0
    """What was still held as backward began, without the tangents."""
    wanted: bool = True
    """Whether it is still to be metered in a timed step. What a checked step shows is too high: it
    holds the inputs of calls until the calls come back."""

    def metered(self, reading: Reading, visit: Visit, trace: Trace) -> None:
        """Take what was metered of the step of `visit`."""
        tangents, gradients = tangent_bytes(trace), gradient_bytes(trace)
        waiting = reading.level_bytes(visit.forward_stop)
        levels, peaks = [], []
        for n, wait in enumerate(visit.waits):
            # Plans have room for the gradients of a backward call after which another one comes.
            counted = waiting + tangents + gradients * (n > 0)
            levels.append(reading.level_bytes(wait.stop) + wait.away_bytes - counted)
            peak = reading.peak_bytes(wait.start, wait.stop) + max(0, wait.away_bytes)
            peaks.append(peak - counted)
        self.lingering_bytes = max(0, *levels)
        self.between_bytes = max(0, max(peaks) - self.lingering_bytes)


@dataclass(frozen=True, slots=True)
class Shown:
    """All that a plan needs of what profiled steps have shown."""

    profile: Profile
    program: Program
    """What the steps ran."""
    kept: bool
    """Whether that keeps everything because there was plenty of room."""
    base_bytes: int
    """As `TimedSteps.base_bytes`."""
    dropped_base_bytes: int
    """As `TimedSteps.dropped_base_bytes`."""
    open_base_bytes: int
    """As `TimedSteps.open_base_bytes`."""
    between_bytes: int
    """As `Waiting.between_bytes`."""
    lingering_bytes: int
    """As `Waiting.lingering_bytes`."""
    gone: frozenset[int]
    """As `TimedSteps.gone`."""
    early: bool
    """Whether not enough steps were timed yet."""

    def beside(self, base_bytes: int) -> Shown:
        """The same, with at least `base_bytes` of external memory as steps begin."""
        return replace(self, base_bytes=max(self.base_bytes, base_bytes))
