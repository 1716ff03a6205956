"""metering: decide which steps of one budget's graphs are metered, and record their peaks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from weakref import WeakMethod, ref

import torch

from outcore.capture import under_checkpoint
from outcore.measure import open_meter
from outcore.runtime.budget.observer import Observer
from outcore.runtime.budget.registry import IDLE_STEPS, Registry
from outcore.runtime.budget.residency import Residency
from outcore.runtime.budget.steps import LONGEST_STEP
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.obstacle import Obstacle
from outcore.runtime.step.metered_step import (
    MeteredStep,
    end_abandoned,
    in_backward,
    metered_elsewhere,
)
from outcore.runtime.step.visit import Interlude

MOST_PEAK_TRIES = 8
"""Steps that are metered for the peak of one graph: another graph in them may never be planned."""


class Metering:
    """Meters one step at a time.

    Either graphs in the step are profiled, or all are planned and its peak is measured.
    """

    def __init__(
        self,
        device: torch.device,
        registry: Registry,
        residency: Residency,
        observer: Observer,
    ) -> None:
        self._device, self._registry, self._residency = device, registry, residency
        self._observer = observer
        self.running: MeteredStep | None = None
        self._began_in = -1
        """The number of the step in which it began to meter last."""

    @property
    def peak_bytes(self) -> int | None:
        """The highest of the latest metered peaks of the active graphs, in steps that run plans.

        None if no such step was metered.
        """
        return _most(s.peaks.step_bytes for s in self._registry.statuses())

    @property
    def after_bytes(self) -> int | None:
        """The highest peak from the last backward call of such a step to the next step.

        Or to a report before that, if each of them ended with one. None if none was metered.
        """
        return _most(s.peaks.after_bytes for s in self._registry.statuses())

    def wants_peak(self, graph: PlannedGraph) -> bool:
        """Whether a planned step of `graph` should be metered for its peak.

        Not if the peak and what came after it are known, or if `MOST_PEAK_TRIES` steps were metered
        for it in vain. Nor if a call follows an older plan that holds more: the peak would not be
        that of the plan. Nor if a graph that ran lately is still profiled: the peak would not
        count, and metering would keep that graph from being timed.
        """
        peaks = graph.status.peaks
        if peaks.after_is_whole or peaks.tries >= MOST_PEAK_TRIES:
            return False
        if not self._registry.follows_closely():
            return False
        since = self._registry.steps.number - IDLE_STEPS
        recent = (g for g in self._registry.active() if g.status.history.last_step >= since)
        return all(
            p is None or p.done or g.status.settled for g, p in ((g, g.profiling) for g in recent)
        )

    def forget_peak(self) -> None:
        """Forget all metered peaks, so that steps are metered for them again: they have changed."""
        for status in self._registry.known():
            status.peaks.forget()
        self.renew_tries()

    def renew_tries(self) -> None:
        """Allow `MOST_PEAK_TRIES` more steps to be metered for peaks: there is another graph."""
        for status in self._registry.known():
            status.peaks.tries = 0

    def begin(self, leader: PlannedGraph) -> None:
        """Meter the step that begins with `leader`, unless a step is metered already.

        If metering is impossible, `leader.unmetered` gets the reason.
        """
        if self.running is not None:
            return
        steps, meter = self._registry.steps, open_meter(self._device)
        resident = self._residency.resident_bytes()
        paused = WeakMethod(self._observer.paused)
        metered = MeteredStep(ref(leader), resident, steps.calls, steps.number, meter, paused)
        begun = metered.start()
        if not begun and in_backward():
            leader.unmetered(Obstacle.INSIDE_BACKWARD)
        elif not begun and metered_elsewhere():
            leader.unmetered(Obstacle.METERED_ELSEWHERE)
        elif not begun:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        if begun:
            self.running, self._began_in = metered, steps.number
        leader.status.peaks.tries += begun and leader.planned is not None

    def was_metered(self, step: int) -> bool:
        """Whether step number `step`, the latest one that has come to an end, was metered."""
        return self.running is not None or self._began_in >= step

    def note_call(self, graph: PlannedGraph) -> bool:
        """Note a forward call of `graph`; returns whether it is its first in a metered step."""
        metered = self.running
        if metered is None or id(graph.status) in metered.called:
            return False
        metered.called.add(id(graph.status))
        return True

    def end(
        self, *, whole: bool = True, beside: PlannedGraph | None = None, early: bool = False
    ) -> bool:
        """Stop metering, if a step is metered and this thread is not inside a backward call.

        `whole`: the metered step is over. Returns whether it is, and all graphs in it were settled.
        `beside`: the graph that begins the next step; it does not count.
        `early`: more may come before the next step.
        """
        metered = self.running
        if metered is None or in_backward():
            return False
        self.running = None
        leader = metered.leader()
        if leader is not None and not metered.here():
            leader.unmetered(Obstacle.OTHER_THREADS)
        metered.abandoned = not metered.here()
        metered.stop()
        if leader is not None and metered.lost:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        settled = whole and self._registry.settled(metered.step, beside)
        counts = whole and self._registry.follow_plans(metered.step, beside)
        came_through = metered.came_through if metered.peak_bytes is not None else ()
        graphs = [(owner(), ran()) for owner, ran in came_through]
        counts = counts and all(_followed_its_plan(graph, ran) for graph, ran in graphs)
        for graph, _ in graphs if counts else ():
            if isinstance(graph, PlannedGraph):
                peaks = graph.status.peaks
                peaks.step_bytes = metered.peak_bytes
                if settled:
                    peaks.after_bytes = _most((peaks.after_bytes, metered.after_bytes))
                    peaks.after_is_whole = not (early or metered.cut)
        return settled

    def mark(self) -> int:
        """The time, in ns of the wall clock. The meter can be read for this time later."""
        return time.time_ns() if self.running is None else self.running.meter.mark()

    def enter(self) -> int:
        """The time as a call begins or comes back. Notes the interlude if calls are outstanding."""
        metered, now = self.running, self.mark()
        if metered is None:
            end_abandoned()
            return now
        stores = self._registry.stores.all()
        if stores and metered.left:
            waiting = Counter(store.visit.owner for store in stores)
            private = sum(store.private_bytes for store in stores)
            latest = stores[-1].visit.owner
            again = frozenset(store.visit.owner for store in stores if store.visit.waits)
            metered.interludes.append(Interlude(metered.left, now, waiting, latest, again, private))
        metered.left = 0  # until this call ends: if it raises, what follows is no interlude
        return now

    def leave(self) -> int:
        """The time as a call ends."""
        now = self.mark()
        if self.running is not None:
            self.running.left = now
        return now

    def called(self, caller: PlannedGraph) -> bool:
        """Stop metering if the forward call of `caller` that now begins starts a new step.

        It does if `caller` leads the metered step, or is another size of its leader. Metering also
        stops if the leader is inactive or never comes back; then it was no whole step. Returns as
        `end`.
        """
        metered = self.running
        if metered is None:
            return False
        leader = metered.leader()
        # Some call may be outstanding at all times.
        enough = len(metered.visits) >= self._registry.many_returns
        if leader is caller and (enough or not self._registry.awaits(caller)):
            # Under torch.utils.checkpoint, backward calls the forward of each block again.
            return bool(metered.visits or not under_checkpoint()) and self.end()
        over = metered.here() and bool(metered.visits)
        over = over and (enough or not self._registry.awaits())
        if over and _is_other_size(caller, leader):
            return self.end(beside=caller)
        overlong = self._registry.steps.calls - metered.calls > LONGEST_STEP
        if overlong or leader not in self._registry.active():
            self.end(whole=False)
        return False

    def close_step(self, *, early: bool = False) -> bool:
        """Stop metering if the step is over: the backward of every active graph has run.

        In the middle of a step this does nothing. `early`: for a report, before whose next forward
        call an optimizer's step may come. A profiled step is then left to go on, and a planned one
        is metered once more for what comes after its backward calls. Returns as `end`.
        """
        metered = self.running
        if metered is None or not metered.here() or self._registry.awaits():
            return False
        if early and not self._registry.settled(metered.step):
            return False
        return self._all_came_through(metered) and self.end(early=early)

    def _all_came_through(self, metered: MeteredStep) -> bool:
        observed = {visit.owner() for visit in metered.visits}
        return all(
            g in observed or self._is_absent(g, metered, observed) for g in self._registry.active()
        )

    def _is_absent(
        self, graph: PlannedGraph, metered: MeteredStep, observed: Collection[object]
    ) -> bool:
        """Whether a step can be over without `graph`.

        It can if the graph runs in-core or no backward calls of it come, or if the step ran another
        size of it instead.
        """
        if graph.planned is None and graph.status.settled:
            return True
        others = (g for g in observed if isinstance(g, PlannedGraph))
        uncalled = graph.status.history.last_step < metered.step
        return uncalled and any(_is_other_size(graph, other) for other in others)


def _most(measured: Iterable[int | None]) -> int | None:
    """The most of what was measured; None if nothing was."""
    return max((nbytes for nbytes in measured if nbytes is not None), default=None)


def _followed_its_plan(graph: object, ran: object) -> bool:
    """Whether a call of `graph` that `ran` ran followed its present plan, if there is one."""
    execution = graph.execution if isinstance(graph, PlannedGraph) else None
    return execution is None or execution.has(ran)


def _is_other_size(graph: PlannedGraph, other: PlannedGraph | None) -> bool:
    """Whether the graphs have the same ops but other sizes: a step runs one or the other."""
    if other is None or graph.identity == other.identity:
        return False
    return graph.status.kind == other.status.kind
