"""Engine: one budget, the driver that moves the bytes, and the graphs that share both."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import torch

from outcore import assistant
from outcore.capture import under_checkpoint
from outcore.errors import HostMemoryError, InfeasibleError, OutcoreError, SpillError
from outcore.execute import Driver, open_driver
from outcore.ir.hardware import Tier
from outcore.ir.program import Program
from outcore.ir.trace import Trace
from outcore.measure import Elsewhere, allocated_bytes, open_meter, resident_bytes
from outcore.runtime.announce import announcement
from outcore.runtime.drift import WATCHED_STEPS, Drift
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.growth import Growth
from outcore.runtime.margin import margin_bytes
from outcore.runtime.obstacle import Obstacle
from outcore.runtime.options import Settings
from outcore.runtime.pause import Pause, Storages, storages_of
from outcore.runtime.planned import Planned
from outcore.runtime.planning import Planner
from outcore.runtime.profiling import Profiling
from outcore.runtime.ranks import naming_the_rank
from outcore.runtime.recording import Recorder, Recording
from outcore.runtime.session import Session, in_backward, metered_elsewhere
from outcore.runtime.shares import Shares
from outcore.runtime.standing import Standing
from outcore.runtime.steps import Steps
from outcore.runtime.store import Stores
from outcore.runtime.trial import Trial, Trials
from outcore.units import format_bytes, format_seconds

log = logging.getLogger("outcore")

LONGEST_SESSION = 1024
"""Forward calls after which a metered step is ended: a call that never goes back holds it open."""

IDLE_STEPS = 4
"""Steps without a call after which a graph counts as one that runs no more, unless it has paused
for longer and come back. Fewer than a graph is profiled for: what torch compiles in its stead is
planned without it."""

MOST_PEAK_TRIES = 8
"""Steps that are metered for their peak since a graph was planned: another one may never be."""

REMEMBERED_PLANS = 8
"""Plans kept for graphs that torch may compile again, where fewer graphs than that are live."""


class Engine:
    """What the graphs of one budget share."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.strict = settings.strict
        self.lock = threading.RLock()
        """Held by each call of a graph: threads that train under one budget take turns."""
        self.readings = 2 if device.type == "cuda" else 1
        """Steps to be metered before planning: in the first, cuDNN may try its algorithms out."""
        self.driver: Driver = open_driver(
            device, settings.spill_dir, settings.link_bytes_per_second
        )
        self.planner = Planner(settings, self.driver)
        self.recorder, self.trials = Recorder(self.driver), Trials(self.driver)
        self.growth = Growth(self)
        self.stores = Stores()
        self._graphs: list[tuple[ref[PlannedGraph], Standing]] = []
        self._plans: OrderedDict[tuple[str, int], Planned] = OrderedDict()
        """Digest of a captured trace, and how many like it wait when it is called -> its plan, the
        latest last; outlives graphs, for recompiles."""
        self._most_graphs = 0
        self.steps = Steps()
        self.session: Session | None = None
        self.measured_peak_bytes: int | None = None
        """The peak of the last metered step after all graphs were planned."""
        self.measured_after_bytes: int | None = None
        """That of what came between its last backward call and the next step."""
        self._peak_tries = 0
        self._elsewhere = Elsewhere()
        self._collected_in = -1
        """The number of the step in which what is no one's any more was let go last."""

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs whose compiled code torch still has, oldest first."""
        return [g for g in (each() for each, _ in self._graphs) if g is not None]

    def active(self) -> list[PlannedGraph]:
        """Graphs that still run; one that a recompile replaced is not among them."""
        waiting = set(self.stores.owners())
        return [g for g in self.graphs if g in waiting or self._recent(g.standing)]

    def standings(self) -> list[Standing]:
        """How the graphs stand that run, or that ran last: torch may have dropped them since."""
        waiting = set(self.stores.owners())
        return [s for each, s in self._graphs if each() in waiting or self._recent(s)]

    def known(self) -> list[Standing]:
        """How all graphs stand whose code torch still has, and those that ran last."""
        return [s for each, s in self._graphs if each() is not None or self._recent(s)]

    def _recent(self, standing: Standing) -> bool:
        return self.steps.number - standing.last_step <= max(IDLE_STEPS, 2 * standing.longest_pause)

    def add(self, graph: PlannedGraph) -> None:
        """Take in a captured graph. One that was planned before (a recompile) keeps its plan.

        What is known of graphs that torch has dropped is forgotten. Raises DigestError with
        `strict` where the file of plans is known to have none for it.
        """
        self.check_known(graph, checked=False)
        graph.standing.place = self._place(graph)
        planned = self._plans.pop(key := (graph.digest, graph.standing.place), None)
        if planned is not None:
            self._plans[key] = planned
            graph.adopt(planned)
        graph.standing.last_step = self.steps.number
        self.planner.solver.captured(graph)
        self._graphs = [(ref(g), g.standing) for g in (*self.graphs, graph)]
        self._most_graphs = max(self._most_graphs, len(self._graphs))
        self._peak_tries = 0

    def _place(self, graph: PlannedGraph) -> int:
        """How many graphs like it wait for their backward."""
        return sum(other.digest == graph.digest for other in self.outstanding(graph))

    def check_known(self, graph: PlannedGraph, *, checked: bool) -> None:
        """Raise DigestError with `strict` where the file of plans is known to have none for it.

        `checked`: the trace has been held against a step.
        """
        if self.strict:
            self.settings.given.check_known(graph.captured.trace, checked=checked)

    def outstanding(self, graph: PlannedGraph) -> Counter[PlannedGraph]:
        """Other graphs whose backward is still to come, and how many calls of each."""
        owners = (o for o in self.stores.owners() if isinstance(o, PlannedGraph))
        return Counter(o for o in owners if o is not graph)

    def waiting(self, graph: PlannedGraph) -> int:
        """Calls of `graph` whose backward is still to come."""
        return sum(owner is graph for owner in self.stores.owners())

    def resident_besides(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """Bytes that live tensors hold now, but for those of the graph.

        Left out are its inputs and constants and, while it is profiled, what earlier calls of it
        made and hold. What the storages of inputs hold beyond them counts: the graph's trace knows
        nothing of that.
        """
        given = (*inputs, *graph.captured.constants)
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        tensors += [t for store in self.stores.of(graph) for t in store.own()]
        return self.resident_bytes(tensors) + _beyond(graph.captured.trace, given, self.device)

    def close(self, reason: str) -> None:
        """Let the graphs run in-core from now on, and bound the process's memory no more.

        Close the driver if no call needs it any more.
        """
        with self.lock:
            for graph in self.graphs:
                graph.retire(reason)
            self.end_session(whole=False)
            self.driver.bound_memory(0, None)
            if not len(self.stores):
                self.driver.close()

    # ---- the meter ------------------------------------------------------------------------------

    def wants_peak(self) -> bool:
        """Whether a planned step should be metered for its peak: it is not known, nor in vain.

        It would be in vain beside a graph that is profiled, and would keep that from being timed.
        """
        if self.measured_peak_bytes is not None or self._peak_tries >= MOST_PEAK_TRIES:
            return False
        profiled = ((g, g.profiling) for g in self.active())
        return all(p is None or p.done or g.standing.settled for g, p in profiled)

    def meter_again(self) -> None:
        """Meter another step for its peak: it is not what it was."""
        self.measured_peak_bytes, self.measured_after_bytes, self._peak_tries = None, None, 0

    def begin_session(self, leader: PlannedGraph) -> bool:
        """Meter the step that begins with `leader`; False where impossible, or under way."""
        if self.session is not None:
            return False
        calls, meter = self.steps.calls, open_meter(self.device)
        session = Session(ref(leader), self.resident_bytes(), calls, meter)
        begun = session.start()
        if not begun and in_backward():
            leader.unmetered(Obstacle.INSIDE_BACKWARD)
        elif not begun and metered_elsewhere():
            leader.unmetered(Obstacle.METERED_ELSEWHERE)
        elif not begun:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        self.session = session if begun else None
        self._peak_tries += begun and leader.planned is not None
        return begun

    def end_session(self, *, whole: bool = True) -> None:
        """End the session, if there is one and autograd is not at work; `whole`: as one step."""
        session = self.session
        if session is None or in_backward():
            return
        self.session = None
        leader = session.leader()
        if leader is not None and not session.here():
            leader.unmetered(Obstacle.OTHER_THREADS)
        session.stop()
        if leader is not None and session.lost:
            leader.unmetered(Obstacle.ANOTHER_PROFILER)
        if whole and self._settled():
            self.measured_peak_bytes = session.peak_bytes
            self.measured_after_bytes = session.after_bytes
            self._bound_memory()  # once more, for planning and metering leave holes behind

    def mark(self) -> int:
        """The time, in nanoseconds of the wall clock, for which the meter may be asked."""
        if self.session is not None:
            self.session.meter.mark()
        return time.time_ns()

    def next_step(self, caller: PlannedGraph) -> None:
        """Count the forward call of `caller` that now begins; a new step's ends the session."""
        self._count(caller)
        self.trials.check(self.steps.number)
        session = self.session
        if session is None:
            return
        leader = session.leader()
        if leader is caller and not self.waiting(caller):
            if session.visits or not under_checkpoint():  # where backward calls each block again
                self.end_session()
        elif leader not in self.active() or self.steps.calls - session.calls > LONGEST_SESSION:
            self.end_session(whole=False)

    def pass_by(self, caller: int) -> None:
        """Note the forward call of a graph that cannot be planned: others may run no more."""
        with self.lock:
            self.steps.pass_by(caller, waiting=bool(len(self.stores)))

    def _count(self, caller: PlannedGraph) -> None:
        begins = not len(self.stores)
        if not begins and self.steps.overlong:
            for _, standing in self._graphs:
                standing.forget(self.steps.number)
            begins = True
        self.steps.call(begins=begins)
        if caller.planned is None:
            caller.standing.place = self._place(caller)
        caller.standing.called(self.steps.number)

    def close_step(self) -> None:
        """End the session where its step is over: every graph that runs came through backward.

        For who asks after a step. In the middle of one this does nothing, so asking there changes
        nothing of what is measured; nor does it after one, where the next forward call would end
        the session, and what is counted is over.
        """
        if not self.lock.acquire(blocking=False):
            return  # another thread is in the middle of one
        try:
            session = self.session
            if session is None or not session.here() or len(self.stores):
                return
            seen = {visit.owner() for visit in session.visits}
            idle = (g for g in self.active() if g.planned is None and g.standing.settled)
            if seen.union(idle).issuperset(self.active()):
                self.end_session()
        finally:
            self.lock.release()

    def _settled(self) -> bool:
        """Whether there are graphs that run, and none is being profiled."""
        standings = self.standings()
        return bool(standings) and all(s.settled for s in standings)

    def level_bytes(self, graph: PlannedGraph) -> int | None:
        """What is allocated while one call of `graph` waits for its backward.

        None where other calls wait too, and where nobody counts.
        """
        if self.waiting(graph) != 1 or self.outstanding(graph):
            return None
        return self.allocated_bytes()

    def allocated_bytes(self) -> int | None:
        """What the allocator's books have as given out; None where nobody keeps any."""
        if self.device.type == "cuda":
            return allocated_bytes(self.device)
        ledger = self.driver.ledger()
        return None if ledger is None else ledger.live_bytes

    def storages(self, tensors: Iterable[Any]) -> Storages:
        """Those of `tensors` that `level_bytes` counts."""
        ledger = self.driver.ledger()
        counted = None if ledger is None else range(ledger.start, ledger.stop)
        return storages_of(tensors, self.device, counted)

    def begin_pause(
        self, graph: PlannedGraph, given: Storages, results: Iterable[Any]
    ) -> Pause | None:
        """What is held when a forward call of `graph` is over, which was `given` something."""
        level_bytes = self.level_bytes(graph)
        if level_bytes is None:
            return None
        own = Storages(given.found | self.storages(results).found)
        return Pause(level_bytes, own, own.expired)

    def resident_bytes(self, besides: Sequence[torch.Tensor] = ()) -> int:
        """Bytes that live tensors hold on the device, those of `besides` left out."""
        return resident_bytes(self.device, besides, self.driver.ledger(), self._elsewhere)

    # ---- plans ----------------------------------------------------------------------------------

    def still_fits(self, planned: Planned, graph: PlannedGraph, inputs: Sequence[Any]) -> bool:
        """Whether no more is held besides `graph` than when its plan was made, but for the margin.

        Always so where everything is kept and the budget has room for what came on top.
        """
        more = self.resident_besides(graph, inputs) - planned.resident_bytes
        margin = margin_bytes(self.settings.budget_bytes)
        if more > margin and self._collected_in != self.steps.number:
            gc.collect()  # what compilation left, as in `floor_program`
            self._collected_in = self.steps.number
            more = self.resident_besides(graph, inputs) - planned.resident_bytes
        return more <= margin or (
            planned.everything_kept
            and planned.predicted.peak(Tier.DEVICE) + more <= self.settings.budget_bytes
        )

    def floor_program(
        self, graph: PlannedGraph, inputs: Sequence[Any], *, leanest: bool
    ) -> tuple[Program, int]:
        """The program of the profiled steps, and how much may be held besides while it fits.

        Raises InfeasibleError where even the leanest does not fit the budget.
        """
        collect = self._collected_in != self.steps.number
        while True:
            if collect:
                gc.collect()  # what is no one's any more would be counted as resident
                self._collected_in = self.steps.number
            self.driver.bound_memory(self.resident_bytes(), self.settings.budget_bytes)
            resident, shares = self.resident_besides(graph, inputs), self._shares(graph)
            try:
                with naming_the_rank():
                    return self.planner.floor_program(shares, resident, leanest=leanest)
            except InfeasibleError:
                if collect:
                    raise
            collect = True  # the compilation of other graphs in this step may have left something

    def kept_program(self, graph: PlannedGraph, resident_bytes: int) -> tuple[Program, int]:
        """The program that keeps everything, and how much may be held besides while it fits."""
        return self.planner.kept_program(self._shares(graph), resident_bytes)

    def plan(self, graph: PlannedGraph, profiled: Profiling) -> Planned:
        """Plan `graph` from what was measured. Everything is kept where that fits.

        Raises InfeasibleError where no plan of the policy fits the budget.
        """
        with naming_the_rank():
            planned = self._take(graph, self.planner.plan(self._shares(graph), profiled))
        number = 1 + self.graphs.index(graph)
        log.info("%s", announcement(planned, self.settings.policy, number))
        return planned

    def plan_tighter(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """The same with less: something else took device memory, or an op more than measured.

        Raises InfeasibleError where no plan of the policy fits.
        """
        return self._take(graph, self.planner.plan_tighter(self._shares(graph), planned))

    def plan_beside_more(
        self, graph: PlannedGraph, planned: Planned, more_bytes: int, ahead_bytes: int
    ) -> Planned:
        """The same with so much more held besides, and what is ahead if there is room for that.

        Raises InfeasibleError where no plan of the policy fits.
        """
        if ahead_bytes:
            with contextlib.suppress(OutcoreError):
                return self._beside_more(graph, planned, more_bytes + ahead_bytes)
        return self._beside_more(graph, planned, more_bytes)

    def _beside_more(self, graph: PlannedGraph, planned: Planned, more_bytes: int) -> Planned:
        shares = self._shares(graph)
        with naming_the_rank():
            again = self.planner.plan_beside_more(shares, planned, more_bytes)
            again = self._take(graph, again)
        text = announcement(again, self.settings.policy, 1 + self.graphs.index(graph))
        log.info("planned again beside %s more. %s", format_bytes(more_bytes), text)
        return again

    def plan_for_calls(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """The same for as many calls as waited for their backward at once.

        Raises InfeasibleError where no plan of the policy fits.
        """
        return self._take(graph, self.planner.plan_for_calls(self._shares(graph), planned))

    def begin_trial(self, graph: PlannedGraph) -> Trial | None:
        """Time the plan of `graph` for some steps, if those before took another time than planned.

        Not while a step is metered, nor beside the trial of another graph.
        """
        planned, busy = graph.planned, self.session is not None or self.trials.busy
        if planned is None or busy or self.recorder.busy or self.settings.drift is None:
            return None
        drift = graph.standing.drift(self.driver.clock, WATCHED_STEPS, done=True)
        if drift is None or not drift.beyond(self.settings.drift):
            return None
        return self.trials.begin(graph.captured.trace, planned, drift, self.steps.number)

    def begin_recording(self, graph: PlannedGraph) -> Recording | None:
        """Time the next step of `graph`, if somebody asked and it is a step like any other.

        Not while a step is metered, nor beside a trial; nor where a call waits for its backward.
        """
        planned, busy = graph.planned, self.session is not None or self.trials.busy
        if planned is None or busy or graph.recorded >= self.recorder.asked or self.waiting(graph):
            return None
        return self.recorder.begin(graph, planned)

    def plan_again(self, graph: PlannedGraph, trial: Trial) -> Planned:
        """Plan `graph` from what a trial of its plan measured. That plan stays if it is the best.

        It also stays where the outer tiers have no room for the better one.
        """
        self.driver.drain()  # what is still under way has not been reported
        self.trials.end(trial)
        planned, problem, drift = trial.planned, trial.problem(), trial.drift
        plans = self.planner.plan_again(self._shares(graph), planned, problem, drift)
        for better in plans[:-1]:
            with contextlib.suppress(SpillError, HostMemoryError):
                return self._tell(drift, self._take(graph, better))
        return self._tell(drift, self._take(graph, plans[-1]))

    def _tell(self, drift: Drift, planned: Planned) -> Planned:
        what = (
            "another plan" if planned.replanned and planned.replanned.changed else "the same plan"
        )
        now = format_seconds(planned.predicted.seconds)
        log.info("%s: planned again with measured times: %s, predicted %s", drift, what, now)
        return planned

    def _shares(self, graph: PlannedGraph) -> Shares:
        return self.planner.shares(graph, self.active())

    def _take(self, graph: PlannedGraph, planned: Planned) -> Planned:
        """Make room for a plan, and keep it."""
        if self.device.type == "cpu":
            assistant.dismiss()  # its memory would be missing while the step runs
        self._bound_memory({graph: planned})  # first: host memory that is locked takes some of it
        nbytes = {tier: planned.predicted.peak(tier) for tier in (Tier.HOST, Tier.DISK)}
        others = (p for p in self._plans_with({graph: planned}) if p is not None)
        if not nbytes[Tier.HOST] and any(p.predicted.peak(Tier.HOST) for p in others):
            del nbytes[Tier.HOST]  # theirs stays ready
        try:
            self.driver.reserve(nbytes)
        except OutcoreError:
            self._bound_memory()  # the plans before stay
            raise
        self._remember((graph.digest, graph.standing.place), planned)
        return planned

    def _remember(self, key: tuple[str, int], planned: Planned) -> None:
        self.meter_again()
        self._plans[key] = planned
        self._plans.move_to_end(key)
        while len(self._plans) > max(REMEMBERED_PLANS, self._most_graphs):
            self._plans.popitem(last=False)

    def _plans_with(self, latest: dict[PlannedGraph, Planned]) -> list[Planned | None]:
        """Those of the graphs that run, some of which are about to have others."""
        return list(({g: g.planned for g in self.active()} | latest).values())

    def _bound_memory(self, latest: dict[PlannedGraph, Planned] | None = None) -> None:
        """Hold the process to the plans' peak, unless no graph that runs moves anything."""
        plans = self._plans_with(latest or {})
        bound: int | None = None
        if not all(p is None or p.everything_kept for p in plans):
            known = [p.predicted.peak(Tier.DEVICE) for p in plans if p is not None]
            bound = max(known) if len(known) == len(plans) else self.settings.budget_bytes
        self.driver.bound_memory(self.resident_bytes(), bound)


def _beyond(trace: Trace, given: Sequence[Any], device: torch.device) -> int:
    """Bytes of the storages of `given`, inputs of `trace`, beyond what it has of them."""
    storages: dict[int, int] = {}
    for value, each in zip(trace.inputs, given, strict=True):
        if isinstance(each, torch.Tensor) and each.device == device:
            storage = each.untyped_storage()
            whole = storages.setdefault(storage.data_ptr(), storage.nbytes())
            storages[storage.data_ptr()] = whole - trace.buffers[trace.values[value].buffer].nbytes
    return sum(nbytes for nbytes in storages.values() if nbytes > 0)
