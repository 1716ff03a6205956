"""MeteredStep: meters one training step with the allocator's counters.

The meter begins with the first forward call that wants it. It ends with the next forward call of
the same graph, or of the same graph at another size, so it sees the whole step, with what is
computed between and outside the graphs. A report after the last backward call also ends it.

It cannot end inside backward. Autograd runs backward in a copy of the thread's state. If the
profiler, which is the meter of a CPU, were stopped there, it would go on in the original.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from outcore.measure import Meter, Reading
from outcore.runtime.step.visit import Interlude, Visit


def in_backward() -> bool:
    """Whether autograd runs this thread's code as part of a backward call."""
    return bool(torch._C._current_graph_task_id() != -1)


_running: dict[threading.Thread, MeteredStep] = {}
"""Thread -> its metered step. At most one of these threads is alive, because a process can run
one profiler at a time, and the counters of a device have one peak."""

_starting = threading.Lock()

_local = threading.local()
"""Holds `farewell`, which dies with the thread."""


def metered_elsewhere() -> bool:
    """Whether a step is being metered on another live thread."""
    others = (thread for thread in list(_running) if thread is not threading.current_thread())
    return any(thread.is_alive() for thread in others)


def end_abandoned() -> None:
    """End the metered step of this thread if another thread has given it up."""
    step = _running.get(threading.current_thread()) if _running else None
    if step is not None and step.abandoned:
        step.visits.clear()
        step.stop()


class _Farewell:
    """Ends the meter of a thread that ends before its step does, if no other thread can end it.

    A profiler that is left running crashes the process at exit.
    """

    def __init__(self, step: MeteredStep) -> None:
        self.metered = step

    def __del__(self) -> None:
        metered = self.metered
        if metered.meter.running and threading.get_ident() == metered.thread.ident:
            metered.meter.stop()
            _running.pop(metered.thread, None)


@dataclass(slots=True)
class MeteredStep:
    """A running meter, its leader (the graph that began it, weakly), and what was seen so far."""

    leader: weakref.ref[Any]
    resident_bytes: int
    calls: int
    """The engine's count of forward calls as the meter began."""
    step: int
    """The number of the engine's step at that time."""
    meter: Meter
    paused: weakref.WeakMethod[Any]
    """Takes, for each graph with outstanding calls, the most that was held in an interlude: that
    graph, the interlude, the outstanding calls by graph, and a function that gives the bytes. Held
    weakly: a metered step that only its own thread may end can outlive its engine."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    ending: threading.RLock = field(default_factory=threading.RLock)
    """Held while the meter ends: a report may end it too, and so may the garbage collector."""
    started: int = field(default_factory=time.time_ns)
    visits: list[Visit] = field(default_factory=list)
    interludes: list[Interlude] = field(default_factory=list)
    came_through: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = field(default_factory=list)
    """The graphs of the visits and what ran each, once the meter has ended. Weakly: this may
    outlive them."""
    called: set[int] = field(default_factory=set)
    """`id` of the statuses of graphs that wanted the meter for a forward call."""
    left: int = 0
    """When the latest call ended; 0: none did."""
    peak_bytes: int | None = None
    """The step's device peak, everything counted, up to the last backward call. None until the
    meter ends."""
    lost: bool = False
    """Whether the meter ended and had nothing to report."""
    after_bytes: int | None = None
    """The device peak from the last backward call until the meter ends: usually that of the
    optimizer's step. None until the meter ends."""
    abandoned: bool = False
    """Whether it was given up by a thread that may not end the meter."""
    cut: bool = False
    """Whether it ended early, because the process was forked."""
    ends: weakref.finalize[..., Any] | None = None
    """Ends the meter when its leader is freed."""

    def start(self) -> bool:
        """Begin to meter; False if that is impossible. Metered steps left over are ended first."""
        if in_backward():
            return False
        for thread, step in list(_running.items()):
            if thread is self.thread or not thread.is_alive():
                step.stop()
        with _starting:
            begun = not metered_elsewhere() and self.meter.start()
            if begun:
                _running[self.thread] = self
                _local.farewell = None if self.meter.anywhere else _Farewell(self)
        leader = self.leader()
        if begun and leader is not None:  # once it is gone, no call of it will end the meter
            self.ends = weakref.finalize(leader, self.stop)
            self.ends.atexit = False
        return begun

    def sees(self, visit: Visit) -> bool:
        """Whether the meter saw all of `visit`, whose backward has just run on this thread."""
        return visit.forward_stop >= self.started and self.meter.sees()

    def _peak_bytes(self, reading: Reading, interlude: Interlude) -> int:
        return self.resident_bytes + reading.peak_bytes(interlude.start, interlude.stop)

    def here(self) -> bool:
        """Whether this thread may end the meter."""
        return self.meter.anywhere or threading.current_thread() is self.thread

    def stop(self) -> None:
        """End, and hand the reading to the visits whose backward call is over.

        From a thread that may not end the meter nothing can be read, and this does nothing.
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
        self.came_through = [(visit.owner, weakref.ref(visit.ran)) for visit in self.visits]
        self.visits.clear()
        self.interludes.clear()

    def _hand_out(self, reading: Reading) -> None:
        done = [v for v in self.visits if v.backward_stop]
        if done:
            last = max(v.backward_stop for v in done)
            self.peak_bytes = self.resident_bytes + reading.peak_bytes(self.started, last)
            self.after_bytes = self.resident_bytes + reading.peak_bytes(last)
        for interlude in self.interludes:
            self._hand_out_peak(reading, interlude)
        for visit in done:
            graph = visit.owner()
            if graph is not None:
                graph.metered(reading, visit)

    def _hand_out_peak(self, reading: Reading, interlude: Interlude) -> None:
        paused = self.paused()
        if paused is None:
            return
        found = ((owner(), calls) for owner, calls in interlude.waiting.items())
        calls = {graph: number for graph, number in found if graph is not None}
        peak_bytes = cache(partial(self._peak_bytes, reading, interlude))
        for graph in calls:
            paused(graph, interlude, calls, peak_bytes)


def _stop_before_fork() -> None:
    """End this thread's metered step. In the forked process, its profiler would never end."""
    step = _running.get(threading.current_thread())
    if step is not None and not step.meter.anywhere:
        step.cut = True
        step.stop()


os.register_at_fork(before=_stop_before_fork)


@atexit.register
def _stop_all() -> None:
    """End all metered steps: a profiler that runs while the interpreter exits crashes it."""
    for step in list(_running.values()):
        step.visits.clear()
        step.stop()
