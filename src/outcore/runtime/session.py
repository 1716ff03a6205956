"""Session: one training step under the allocator's meter.

The meter begins with the first forward call that wants it and ends with the next forward call of
the same graph, or of another size of it, so that it sees the whole step: what is computed between
and beside the graphs too. A report ends it, too, if the step is over.
It cannot end inside backward: autograd runs backward in a copy of the thread's state, and the
profiler, which is the meter of a CPU, would go on in the original if it were stopped there.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import torch

from outcore.gauges import Moment
from outcore.measure import Meter, Reading
from outcore.runtime.call_tensors import CallTensors
from outcore.runtime.pause import Pause
from outcore.runtime.replay import Replay

Calls: TypeAlias = Mapping[Any, int]
"""Graphs, and how many calls of each."""


class Metered(Protocol):
    """Who gets the reading of a visit."""

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take what the meter saw of the step that `visit` belongs to."""
        ...

    def paused(self, interlude: Interlude, calls: Calls, peak_bytes: Callable[[], int]) -> None:
        """Take what was held at most between two calls while one of this graph waited.

        `calls`: those that waited then, by graph.
        """
        ...


@dataclass(frozen=True, slots=True)
class Interlude:
    """From when to when no call ran, in ns of the wall clock, while some waited."""

    start: int
    stop: int
    waiting: Mapping[weakref.ref[Any], int]
    """Their graphs, and how many of each."""
    latest: weakref.ref[Any]
    """The graph of the one that began last."""
    private_bytes: int
    """What they alone hold."""


@dataclass(slots=True)
class Visit:
    """One forward call on its way through its backward call, with the wall clock in ns."""

    owner: weakref.ref[Metered]
    replay: Replay | None = None
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """Where the forward call ran."""
    forward_stop: int = 0
    backward_start: int = 0
    backward_stop: int = 0
    pause: Pause | None = None
    """What was held when the forward call was over, where that was asked."""
    call_tensors: CallTensors | None = None
    """What the forward call was given and returned, where its ops were timed."""
    work: list[tuple[Moment, Moment]] = field(default_factory=list)
    """From when to when the device was at it, by the driver's clock: forward, then backward."""

    @property
    def once(self) -> bool:
        """Whether it went through backward once, so far: it may again, with `retain_graph`."""
        _, *backward = self.work
        return len(backward) == 1


def in_backward() -> bool:
    """Whether autograd runs this thread's code as part of a backward call."""
    return bool(torch._C._current_graph_task_id() != -1)


_running: dict[threading.Thread, Session] = {}
"""Per thread the session under way: of those alive one at most, as a process can run one profiler
at a time, and the counters of a device have one peak."""

_starting = threading.Lock()

_local = threading.local()
"""What dies with a thread: its `farewell`."""


def metered_elsewhere() -> bool:
    """Whether a step is being metered on another thread that lives."""
    others = (thread for thread in list(_running) if thread is not threading.current_thread())
    return any(thread.is_alive() for thread in others)


class _Farewell:
    """Ends the session of a thread that ends before its step does, where no other thread can.

    A profiler that is left behind crashes the process when it ends.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def __del__(self) -> None:
        session = self.session
        if session.meter.running and threading.get_ident() == session.thread.ident:
            session.meter.stop()
            _running.pop(session.thread, None)


@dataclass(slots=True)
class Session:
    """A running meter, the graph that leads it (weakly), and the visits seen so far."""

    leader: weakref.ref[Any]
    resident_bytes: int
    calls: int
    """Forward calls of the engine's graphs when it began."""
    step: int
    """The number of the step that was under way then."""
    meter: Meter
    thread: threading.Thread = field(default_factory=threading.current_thread)
    ending: threading.RLock = field(default_factory=threading.RLock)
    """Held while it ends: who asks for a report may end it too, and so may the collector."""
    started: int = field(default_factory=time.time_ns)
    visits: list[Visit] = field(default_factory=list)
    interludes: list[Interlude] = field(default_factory=list)
    called: set[int] = field(default_factory=set)
    """The graphs that wanted the meter for a forward call, by the identity of how they stand."""
    left: int = 0
    """When the latest call ended."""
    peak_bytes: int | None = None
    """The step's peak, everything counted; known once the session has ended."""
    lost: bool = False
    """Whether it ended and its meter had nothing to tell."""
    after_bytes: int | None = None
    """The peak of what came after the last backward call: the optimizer's step, as a rule."""
    ends: weakref.finalize[..., Any] | None = None
    """What ends it with its leader."""

    def start(self) -> bool:
        """Begin; False where the meter cannot. Those left over are ended first."""
        if in_backward():
            return False
        for thread, session in list(_running.items()):
            if thread is self.thread or not thread.is_alive():
                session.stop()
        with _starting:
            begun = not metered_elsewhere() and self.meter.start()
            if begun:
                _running[self.thread] = self
                _local.farewell = None if self.meter.anywhere else _Farewell(self)
        leader = self.leader()
        if begun and leader is not None:  # once it is gone, no call of it will end the session
            self.ends = weakref.finalize(leader, self.stop)
            self.ends.atexit = False
        return begun

    def sees(self, visit: Visit) -> bool:
        """Whether the meter saw the visit, whose backward has just run on this thread."""
        return visit.forward_stop >= self.started and self.meter.sees()

    def _peak_bytes(self, reading: Reading, interlude: Interlude) -> int:
        return self.resident_bytes + reading.peak_bytes(interlude.start, interlude.stop)

    def here(self) -> bool:
        """Whether this thread may end it."""
        return self.meter.anywhere or threading.current_thread() is self.thread

    def stop(self) -> None:
        """End, and hand the reading to the visits that came through their backward call.

        From another thread than may end it nothing can be read, and nothing is handed out.
        """
        if not self.here() or in_backward():
            return
        with self.ending:
            if not self.meter.running:
                return
            reading = self.meter.stop()
        if self.ends is not None:
            self.ends.detach()
        if not self.meter.anywhere:
            _local.farewell = None
        if _running.get(self.thread) is self:
            _running.pop(self.thread, None)
        if reading is None:
            self.lost = True
        else:
            self._hand_out(reading)
        self.visits.clear()
        self.interludes.clear()

    def _hand_out(self, reading: Reading) -> None:
        done = [v for v in self.visits if v.backward_stop]
        if done:
            last = max(v.backward_stop for v in done)
            self.peak_bytes = self.resident_bytes + reading.peak_bytes(self.started, last)
            self.after_bytes = self.resident_bytes + reading.peak_bytes(last, time.time_ns())
        for interlude in self.interludes:
            found = ((owner(), calls) for owner, calls in interlude.waiting.items())
            calls = {graph: number for graph, number in found if graph is not None}
            peak_bytes = cache(partial(self._peak_bytes, reading, interlude))
            for graph in calls:
                graph.paused(interlude, calls, peak_bytes)
        for visit in done:
            graph = visit.owner()
            if graph is not None:
                graph.metered(reading, visit)


@atexit.register
def _stop_all() -> None:
    """End what still runs: a profiler alive while the interpreter goes down crashes it."""
    for session in list(_running.values()):
        session.visits.clear()
        session.stop()
