"""Metering: which steps of one budget's graphs run under the allocator's meter, and what it saw."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from weakref import ref

import torch

from outcore.capture import under_checkpoint
from outcore.measure import open_meter
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.obstacle import Obstacle
from outcore.runtime.registry import IDLE_STEPS, Registry
from outcore.runtime.residency import Residency
from outcore.runtime.session import Interlude, Session, in_backward, metered_elsewhere

LONGEST_SESSION = 1024
"""Forward calls after which a metered step is ended: a call that never goes back holds it open."""

MOST_PEAK_TRIES = 8
"""Steps that are metered for the peak of one graph: another graph in them may never be planned."""


class Metering:
    """One session at a time: a step of profiled graphs, or one of planned graphs for its peak."""

    def __init__(self, device: torch.device, registry: Registry, residency: Residency) -> None:
        self._device, self._registry, self._residency = device, registry, residency
        self.session: Session | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The highest of the latest peaks of the graphs that run, each of a step that was planned.

        None where no such step was metered.
        """
        known = (s.peak_bytes for s in self._registry.statuses())
        return max((nbytes for nbytes in known if nbytes is not None), default=None)

    @property
    def after_bytes(self) -> int | None:
        """That of what came between the last backward call of such a step and the next step."""
        known = (s.after_bytes for s in self._registry.statuses())
        return max((nbytes for nbytes in known if nbytes is not None), default=None)

    def wants_peak(self, graph: PlannedGraph) -> bool:
        """Whether a planned step of `graph` should be metered for its peak.

        Where that is not known, nor in vain: it would be beside a graph that is profiled, and would
        keep that from being timed.
        """
        status = graph.status
        if status.peak_bytes is not None or status.peak_tries >= MOST_PEAK_TRIES:
            return False
        since = self._registry.steps.number - IDLE_STEPS
        recent = (g for g in self._registry.active() if g.status.last_step >= since)
        return all(
            p is None or p.done or g.status.settled for g, p in ((g, g.profiling) for g in recent)
        )

    def forget_peak(self) -> None:
        """Meter more steps for their peaks: they are not what they were."""
        for status in self._registry.known():
            status.peak_bytes, status.after_bytes = None, None
        self.renew_tries()

    def renew_tries(self) -> None:
        """Let peaks be tried for `MOST_PEAK_TRIES` steps more: there is another graph."""
        for status in self._registry.known():
            status.peak_tries = 0

    def begin(self, leader: PlannedGraph) -> None:
        """Meter the step that begins with `leader`, unless that is impossible, or under way."""
        if self.session is not None:
            return
        steps, meter = self._registry.steps, open_meter(self._device)
        resident = self._residency.resident_bytes()
        session = Session(ref(leader), resident, steps.calls, steps.number, meter)
        begun = session.start()
        if not begun and in_backward():
            leader.unmetered(Obstacle.INSIDE_BACKWARD)
        elif not begun and metered_elsewhere():
            leader.unmetered(Obstacle.METERED_ELSEWHERE)
        elif not begun:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        self.session = session if begun else None
        leader.status.peak_tries += begun and leader.planned is not None

    def note_call(self, graph: PlannedGraph) -> bool:
        """Take that `graph` is called; whether that is the first time in a metered step."""
        session = self.session
        if session is None or id(graph.status) in session.called:
            return False
        session.called.add(id(graph.status))
        return True

    def end(self, *, whole: bool = True, beside: PlannedGraph | None = None) -> bool:
        """End the session, if there is one and autograd is not at work; `whole`: as one step.

        Returns whether it was one in which no graph was profiled; `beside`: the one that begins the
        next step, which does not count.
        """
        session = self.session
        if session is None or in_backward():
            return False
        self.session = None
        leader = session.leader()
        if leader is not None and not session.here():
            leader.unmetered(Obstacle.OTHER_THREADS)
        came_through = [visit.owner() for visit in session.visits]
        session.stop()
        if leader is not None and session.lost:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        settled = whole and self._registry.settled(session.step, beside)
        for graph in came_through if settled and session.peak_bytes is not None else ():
            if isinstance(graph, PlannedGraph):
                status = graph.status
                status.peak_bytes, status.after_bytes = session.peak_bytes, session.after_bytes
        return settled

    def mark(self) -> int:
        """The time, in nanoseconds of the wall clock, for which the meter may be asked."""
        if self.session is not None:
            self.session.meter.mark()
        return time.time_ns()

    def enter(self) -> int:
        """The time, as a call begins or comes back."""
        session, now = self.session, self.mark()
        if session is None:
            return now
        stores = self._registry.stores.all()
        if stores and session.left:
            waiting = Counter(store.visit.owner for store in stores)
            private = sum(store.private_bytes for store in stores)
            latest = stores[-1].visit.owner
            session.interludes.append(Interlude(session.left, now, waiting, latest, private))
        return now

    def leave(self) -> int:
        """The time, as a call ends."""
        now = self.mark()
        if self.session is not None:
            self.session.left = now
        return now

    def called(self, caller: PlannedGraph) -> bool:
        """End the session where the forward call of `caller` that now begins is a new step's.

        As is that of another size of its leader. And where the leader runs no more, or never comes
        back: that was no whole step. Returns as `end`.
        """
        session = self.session
        if session is None:
            return False
        leader = session.leader()
        if leader is caller and not self._registry.waiting(caller):
            # Under a checkpoint backward calls each block again.
            return bool(session.visits or not under_checkpoint()) and self.end()
        over = session.here() and bool(session.visits) and not len(self._registry.stores)
        if over and _takes_turns(caller, leader):
            return self.end(beside=caller)
        overlong = self._registry.steps.calls - session.calls > LONGEST_SESSION
        if overlong or leader not in self._registry.active():
            self.end(whole=False)
        return False

    def close_step(self) -> bool:
        """End the session where its step is over: every graph that runs came through backward.

        In the middle of a step this does nothing, so asking there changes nothing of what is
        measured; nor does it after one, where the next forward call would end the session, and what
        is counted is over. Returns as `end`.
        """
        session = self.session
        if session is None or not session.here() or len(self._registry.stores):
            return False
        return self._all_came_through(session) and self.end()

    def _all_came_through(self, session: Session) -> bool:
        observed = {visit.owner() for visit in session.visits}
        return all(
            g in observed or self._is_absent(g, session, observed) for g in self._registry.active()
        )

    def _is_absent(
        self, graph: PlannedGraph, session: Session, observed: Collection[object]
    ) -> bool:
        """Whether a step is over without it: nobody differentiates it, or it takes turns."""
        if graph.planned is None and graph.status.settled:
            return True
        others = (g for g in observed if isinstance(g, PlannedGraph))
        uncalled = graph.status.last_step < session.step
        return uncalled and any(_takes_turns(graph, other) for other in others)


def _takes_turns(graph: PlannedGraph, other: PlannedGraph | None) -> bool:
    """Whether they are of the same ops, and of other sizes: a step has one or the other."""
    if other is None or graph.digest == other.digest:
        return False
    return graph.status.kind == other.status.kind
