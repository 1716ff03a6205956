"""recording: time one planned step of each graph op by op and copy by copy, on request.

The result is a measured Timeline. A recorder waits for a step that is neither metered nor part of a
trial. Then each graph of the step runs its plan once with a clock around each op, and the driver
reports its copies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ref

from outcore.execute import Driver, Executable, Instruments, build
from outcore.execute.driver import CopySpan
from outcore.gauges import Clock, Moment
from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.program import Copy, Free, Program, Run, Stream
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.runtime.graphs.planned import Planned

if TYPE_CHECKING:  # a graph knows its recorder
    from outcore.runtime.graphs.graph import PlannedGraph

RECORDED_COPIES = 65536
"""Copies that are remembered at most: a step may take long to end."""

LONGEST_RECORDING = 64
"""Steps after which a recording is dropped: its backward call may never come."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Recording:
    """One recorded step of one graph. Moments are by the driver's clock."""

    planned: Planned
    executable: Executable
    began: int
    """Number of the engine's step in which it began."""
    runs: dict[int, tuple[Moment, Moment]]
    """Body position -> when that run started and stopped."""
    lane: int = 0
    """The `key` of the step's lane; 0 until it has one."""
    backward: Moment = None
    """When the backward call began; None until then."""


@dataclass(slots=True)
class Recorder:
    """Records a step of each running graph, once for each request."""

    driver: Driver
    asked: int = 0
    """Number of requests."""
    _open: list[ref[Recording]] = field(default_factory=list)
    """Recordings under way, held by their graphs."""
    _done: list[tuple[ref[PlannedGraph], Recording]] = field(default_factory=list)
    _copies: deque[CopySpan] = field(default_factory=lambda: deque(maxlen=RECORDED_COPIES))
    _zero: tuple[Moment, float] | None = None
    """One moment by the driver's clock, and by the clock of its copies. None: copies are not
    reported."""

    @property
    def busy(self) -> bool:
        """Whether the driver reports copies here for a recording under way."""
        return self._zero is not None

    def ask(self) -> None:
        """Have each graph record its next planned step."""
        self.asked += 1

    def hears(self, recording: Recording) -> bool:
        """Whether `recording` is one of those under way."""
        return any(each() is recording for each in self._open)

    def check(self, step: int) -> None:
        """Drop recordings whose graphs are gone, or that have taken over `LONGEST_RECORDING` steps.

        Then their graphs record another step.
        """
        if not self._open:
            return
        live = [(each, each()) for each in self._open]
        oldest = step - LONGEST_RECORDING
        self._open = [each for each, recording in live if recording and recording.began >= oldest]
        if not self._open:
            self._stop()

    def begin(self, graph: PlannedGraph, planned: Planned, step: int) -> Recording:
        """Begin to record a step of `graph`, to be run by the executable of the Recording.

        `step`: the number of the engine's step.
        """
        clock, runs = self.driver.clock, dict[int, tuple[Moment, Moment]]()

        def note(position: int, start: Moment, stop: Moment) -> None:
            runs[position] = start, stop

        timed, trace = Instruments(timed=True), graph.captured.trace
        executable = build(
            trace,
            planned.program,
            self.driver.generator,
            timed,
            note,
            clock=clock.now,
            layout=planned.layout,
        )
        if not self.busy:
            self.driver.record(self._copies.append)
            self._zero = clock.now(), time.perf_counter()
        recording = Recording(planned, executable, step, runs)
        self._open = [*self._live(), ref(recording)]
        return recording

    def finish(self, graph: PlannedGraph, recording: Recording) -> None:
        """Take a step whose backward call is over. The last one ends the recording of copies."""
        self._done.append((ref(graph), recording))
        self._open = [each for each in self._live() if each() is not recording]
        if not self._open:
            self._stop()

    def drop(self, recording: Recording) -> None:
        """Drop a recording under way."""
        open_now, self._open = self._open, [e for e in self._live() if e() is not recording]
        if open_now and not self._open:
            self._stop()

    def _stop(self) -> None:
        """Stop the recording of copies, and give the graphs that are done their timelines."""
        zero, self._zero = self._zero, None
        if zero is None:
            return
        self.driver.drain()
        self.driver.record(None)
        for owner, recording in self._done:
            graph = owner()
            if graph is not None and graph.planned is recording.planned:
                clock = self.driver.clock
                graph.status.measured = timeline(recording, self._copies, clock, zero)
        self._done.clear()
        self._copies.clear()

    def _live(self) -> list[ref[Recording]]:
        return [each for each in self._open if each() is not None]


def timeline(
    recording: Recording, copies: Iterable[CopySpan], clock: Clock, zero: tuple[Moment, float]
) -> Timeline:
    """The measured Timeline: runs, copies, and where compute waited for copies.

    It begins with the first span. The peaks of the outer tiers are those of the program, which were
    reached. The device's peak is not measured here.
    """
    program, predicted = recording.planned.program, recording.planned.predicted
    base, zero_seconds = zero
    times = {
        position: (clock.seconds(base, start), clock.seconds(base, stop))
        for position, (start, stop) in recording.runs.items()
    }
    times |= {
        position: (span.start_seconds - zero_seconds, span.stop_seconds - zero_seconds)
        for position, span in _placed(program, recording.lane, copies)
    }
    first = min((start for start, _ in times.values()), default=0.0)
    spans = tuple(
        Span(position, program.body[position].stream, start - first, stop - first)
        for position, (start, stop) in sorted(times.items())
    )
    backward = 0.0
    if recording.backward is not None:
        backward = clock.seconds(base, recording.backward) - first
    peaks = tuple((t, nbytes) for t, nbytes in predicted.peak_bytes if t is not Tier.DEVICE)
    stalls = tuple(_stalls(program, {span.instruction: span for span in spans}, backward))
    return Timeline(spans, stalls, peaks, Source.MEASURED)


def _placed(
    program: Program, lane: int, copies: Iterable[CopySpan]
) -> Iterator[tuple[int, CopySpan]]:
    """The body position of each copy of one lane; both are in order of issue."""
    queues: dict[tuple[str, int], deque[int]] = {}
    for position, instruction in enumerate(program.body):
        copy = instruction.action
        if isinstance(copy, Copy):
            leaves = instruction.stream is Stream.OUT
            place = ("out", copy.target) if leaves else ("in", copy.source)
            queues.setdefault(place, deque()).append(position)
    for span in copies:
        queue = queues.get((span.direction, span.region))
        if span.lane == lane and queue:
            yield queue.popleft(), span


def _stalls(program: Program, spans: dict[int, Span], backward: float) -> Iterator[Stall]:
    """Times between runs in which a copy was not done that the next run had to wait for."""
    free, waits = 0.0, list[int]()
    reached = _last_copies(program)
    for position, instruction in enumerate(program.body):
        if position == program.boundary:
            free = max(free, backward)
        if instruction.stream is not Stream.COMPUTE:
            continue
        waits.append(position)
        if not isinstance(instruction.action, Run) or position not in spans:
            continue
        span = spans[position]
        causes = [c for at in waits for c in _awaited(program, at, reached, spans)]
        stop, cause = max(causes, default=(0.0, Cause.PACE), key=lambda each: each[0])
        seconds = min(stop, span.start_seconds) - free
        if seconds > 0:
            yield Stall(position, cause, seconds)
        free, waits = max(free, span.stop_seconds), []


def _awaited(
    program: Program, position: int, reached: dict[int, int], spans: dict[int, Span]
) -> Iterator[tuple[float, Cause]]:
    """For each copy that an instruction waits for: when it was done, and the cause of the wait."""
    instruction = program.body[position]
    for edge in (*instruction.after, *instruction.pace):
        copy = reached.get(edge)
        if copy is None or copy not in spans:
            continue
        cause = Cause.FETCH
        if edge not in instruction.after:
            cause = Cause.PACE
        elif isinstance(instruction.action, Free) or program.body[copy].stream is Stream.OUT:
            cause = Cause.RELEASE
        yield spans[copy].stop_seconds, cause


def _last_copies(program: Program) -> dict[int, int]:
    """Body position on a copy stream -> the last copy at or before it on that stream."""
    latest: dict[Stream, int] = {}
    found = {}
    for position, instruction in enumerate(program.body):
        if isinstance(instruction.action, Copy):
            latest[instruction.stream] = position
        if instruction.stream in latest:
            found[position] = latest[instruction.stream]
    return found
