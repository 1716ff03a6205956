"""PlannedGraph: one captured graph, from its first profiled step to its planned steps.

The first steps run the floor program (it needs little memory, and is sure to fit) and are profiled.
Then the graph is planned, and its steps run the plan. It is planned again if step times drift, if
device memory runs out, or if the plan has too little room for what else is held.

A forward call is outstanding until its backward call begins: then it comes back. External memory is
what the process holds that is not the graph's own.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary, ref

from outcore.capture import Captured, capture_again
from outcore.errors import CaptureError, InfeasibleError, OutcoreError
from outcore.execute import Executable, MismatchError, build
from outcore.gc_paused import gc_paused
from outcore.ir.store import digest
from outcore.ir.verify import verify_trace
from outcore.measure import Reading, says_memory
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.lending import Origin, weights_of
from outcore.runtime.graphs.observations import Observations
from outcore.runtime.graphs.obstacle import Obstacle
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.profiling import (
    MANY_SIZES,
    Keeping,
    Profiling,
    begin_keeping,
    begin_profiling,
)
from outcore.runtime.graphs.status import GraphStatus, State
from outcore.runtime.step.session import Interlude, Visit
from outcore.runtime.step.store import Store
from outcore.units import format_bytes

if TYPE_CHECKING:  # the engine holds graphs, and a graph calls its engine
    from outcore.runtime.budget.engine import Engine

PATIENCE = 16
"""Timed calls, times `GraphStatus.most_outstanding`, after which a graph is planned although an
earlier graph has no plan: that one may never get one."""

STILL_PROFILED = (
    "outcore cannot plan a graph yet: {reason}; until some steps run without it, all steps are "
    "slow profiled steps, inside the budget"
)

AGAIN = "outcore: other graphs hold less from their next calls on: run the step again"


class PlannedGraph:
    """A captured graph: chooses what each step runs, and records what each step shows.

    Only its runner holds it, so it is freed with the code that torch compiled.
    """

    def __init__(
        self, engine: Engine, captured: Captured, fallback: Callable[[], Executable]
    ) -> None:
        self.engine, self.captured = engine, captured
        self._fallback = fallback
        self.digest = digest(captured.trace)
        self.status = GraphStatus(kind=self.ops, digest=self.digest)
        self.profiling: Profiling | None = None
        self.execution: PlannedExecution | None = None
        self.retired = False
        """Whether the graph runs in-core from now on, with `fallback`."""
        self.observed = Observations()
        """Which calls were outstanding as calls of this graph began, waited and came back, and the
        external memory then."""
        self.may_keep = True
        """Whether the graph may keep everything (`Keeping`) while no backward calls come. False
        once another graph finds no plan (`Contention.keep_less`)."""
        self.asked: WeakKeyDictionary[PlannedGraph, int] = WeakKeyDictionary()
        """Planned graphs that this one asked to leave it more memory -> how often, since they last
        answered (`Contention.leaving_more`)."""
        self.others_at_failed_plan: frozenset[object] | None = None
        """State of the other graphs (`_how_others_stand`) when this one last found no plan and
        waited for some of them. It does not try again until that state changes or the wait ends.
        None: no such attempt."""
        self.origin: Origin | None = None
        """What tells it apart from other graphs, but not from the same graph at other sizes. None
        before its first call."""
        self.may_borrow = True
        """Whether it may be profiled with the plan that the graph has for larger sizes. False once
        that turned out to need too much memory, or to leave too little."""
        self.lent_in = -1
        """The number of the latest step whose sizes its plan was lent to; -1: there was none."""
        self.lean = False
        """Whether the graph is profiled with the leanest program, because device memory ran out."""
        self.tightened = False
        """Whether a tighter plan was tried, because device memory ran out. It is tried once: plans
        that are made from it keep what it leaves free."""
        self.obstacles: Counter[Obstacle] = Counter()
        """Steps that could not be metered since the last one that was, by reason."""
        self.confirmed = False
        """Whether a backward call was compared with the trace to its end."""
        self.corrections = 0
        """How often a kernel did not do what was captured."""
        self.recorded = 0
        """`Recorder.asked` when this graph was last recorded."""

    @cached_property
    def fallback(self) -> Executable:
        """What runs the graph in-core."""
        return self._fallback()

    @property
    def ops(self) -> tuple[str, ...]:
        """The targets of its ops. A correction may have added some (`GraphStatus.kind`)."""
        return tuple(op.target for op in self.captured.trace.ops)

    @property
    def planned(self) -> Planned | None:
        """The graph's plan; None until it has one."""
        return self.status.planned

    @property
    def executable(self) -> Executable | None:
        """What steps run once the graph has a plan or is retired; None while it is profiled."""
        if self.retired:
            return self.fallback
        return None if self.execution is None else self.execution.executable

    @property
    def gone(self) -> frozenset[int]:
        """Inputs and outputs of calls that nothing held any more when profiled calls came back."""
        if self.planned is not None:
            return self.planned.external.gone
        return frozenset() if self.profiling is None else self.profiling.gone

    @property
    def private_bytes(self) -> int:
        """The most that one outstanding call alone holds while the graph is profiled; else 0."""
        if self.profiling is None:
            return 0
        keeping = self.profiling.keeping if self.may_keep else None
        kept = 0 if keeping is None else keeping.executable.private_bytes
        return max(kept, self.profiling.checked.private_bytes)

    def adopt(self, planned: Planned) -> None:
        """Take over the plan of a graph with the same trace, and that graph's corrected trace."""
        self.captured, self.confirmed = replace(self.captured, trace=planned.problem.trace), True
        self.settle(planned).adopted = True
        self.status.most_outstanding = planned.calls
        self.status.retained = planned.retaining_bytes is not None
        self.status.planning_seconds = planned.planning_seconds
        self.status.after_beyond_bytes = planned.after_beyond_bytes

    # ---- around the two calls -------------------------------------------------------------------

    def begin_call(self) -> None:
        """Note that a forward call begins."""
        if not self.engine.registry.runs(self):
            self.engine.contention.tell(self)
        self.engine.called(self)

    def executable_for(self, inputs: list[Any]) -> Executable:
        """Choose the executable for the forward call that began; start the meter if needed."""
        with self.telling_of_memory():
            executable = self.ready(inputs)
        if self._wants_meter(executable):
            self.engine.metering.begin(self)  # does nothing if another graph has begun the meter
        elif self.execution is not None and executable is self.execution.executable:
            executable = self.execution.executable_of_step(self)
        if self.planned is not None and self.engine.metering.session is not None:
            self.engine.observer.metered(self, inputs)
        return executable

    def end_call(self, executable: Executable) -> None:
        """Note that the forward call is over, which `executable` ran to the end."""
        if self._wants_meter(executable):
            self.status.steps_without_backward += self.engine.metering.note_call(self)

    def begin_backward(self, store: Store, tangents: list[Any], *, again: bool) -> None:
        """Note that the call of `store` comes back.

        `again`: this backward call must leave its data for another one (`retain_graph`).
        """
        self.status.came_back()
        self.engine.observer.returned(self, store, tangents)
        self.status.retained |= again
        self.engine.observer.waited(self, store.visit, tangents)

    def end_backward(self, executable: Executable, visit: Visit) -> None:
        """Record `visit`, whose backward call has just been run by `executable`."""
        checked, steps = self.checks(executable), self.engine.steps
        self.confirmed |= checked
        steps.returns += 1
        if visit.once:
            self.status.history.came_back(steps.number, steps.calls)
        self._finish(executable, visit)
        if checked:
            self.engine.plans.check_known(self, checked=True)

    def checks(self, executable: Executable) -> bool:
        """Whether `executable` compares the trace with what kernels really return."""
        return self.profiling is not None and self.profiling.checks(executable)

    def times(self, executable: Executable) -> bool:
        """Whether `executable` times the ops of the floor program."""
        return self.profiling is not None and executable is self.profiling.timed

    # ---- before a step --------------------------------------------------------------------------

    def ready(self, inputs: list[Any]) -> Executable:
        """The executable for this step. Plans the graph first if enough is known."""
        if self.execution is not None and self.execution.adopted:
            self._hold_against(self.execution, inputs)
        own = self.engine.registry.waiting(self)
        if not own and self.execution is not None:
            self._leave_layout(self.execution)
        self.engine.observer.called(self, own, inputs)
        self.origin = self.origin or self._origin(inputs)
        waiting = 1 + own
        self.status.most_outstanding = max(self.status.most_outstanding, waiting)
        if self.retired:
            return self.fallback
        if self.execution is not None:
            return self._followed(self.execution, waiting, inputs)
        if self.status.lent is not None and not (self.may_borrow or own):
            self._unprofile()
        profiling = self._begun(inputs) if self.profiling is None else self.profiling
        return self._profiled(profiling, own, inputs)

    @gc_paused()
    def _begun(self, inputs: list[Any]) -> Profiling:
        """As `_begin`, as the first attempt of a call: if nothing fits, others make room.

        What waiting calls hold is moved away, and their graphs hold less from their next calls on.
        """
        others_hold_less: bool | None = None
        while True:
            try:
                self.profiling = self._begin(inputs)
            except InfeasibleError as error:
                if others_hold_less is None:
                    others_hold_less = self.engine.contention.make_room(self, error)
                if not self.engine.eviction.make_room_for(self, error):
                    if others_hold_less:
                        error.add_note(AGAIN)
                    raise
            else:
                return self.profiling

    def _profiled(self, profiling: Profiling, own: int, inputs: list[Any]) -> Executable:
        """The executable while the graph has no plan; once enough is known, that of a new plan.

        `own`: outstanding calls of this graph. Raises InfeasibleError if no plan is found and no
        other graph can be planned first or hold less.
        """
        if self.engine.registry.sizes_beside(self) >= MANY_SIZES:
            profiling.enough_steps = 1
        keeping = profiling.keeping
        if self._keeps_on(keeping):
            return keeping.executable
        if profiling.times:
            self.engine.residency.sweep()
        resident = self.engine.residency.external_bytes(self, inputs)
        fits = resident <= profiling.most_resident_bytes
        if not (own or fits or profiling.done):
            # An optimizer has its state by now. If nothing fits any more, planning reports it.
            with contextlib.suppress(InfeasibleError):
                profiling = self.profiling = self._begin(inputs)
        self.engine.observer.base(self, profiling, own, resident)
        if not profiling.done or self._follows_the_unplanned(profiling):
            return self._unplanned(profiling, resident)
        if profiling.lent is not None:
            return self._lent(profiling, inputs, fits=fits)
        return self._first(profiling, resident)

    def _first(self, profiling: Profiling, resident: int) -> Executable:
        """The executable of the first plan; while others must be planned first, that of profiling.

        Raises as `_profiled` does.
        """
        stand = self._how_others_stand()
        if stand == self.others_at_failed_plan and self._awaits_others(profiling):
            return self._unplanned(profiling, resident)
        self.status.left_over_bytes = profiling.left_over_bytes or 0
        try:
            return self.settle(self.engine.plans.first(self, profiling)).executable
        except InfeasibleError as error:
            waits = self._awaits_others(profiling)
            if not waits and not self.engine.contention.make_room(self, error):
                raise
        self.engine.residency.collect(again=True)  # the error's frames hold inputs of calls
        if waits:
            self.others_at_failed_plan = stand
            return self._unplanned(profiling, resident)
        profiling.again()
        self.observed.met = None
        return profiling.executable

    def _lent(self, profiling: Profiling, inputs: list[Any], *, fits: bool) -> Executable:
        """The executable of the plan lent by larger sizes. If it does not fit, profile anew."""
        planned = self.engine.plans.take_lent(self, profiling) if fits else None
        if planned is not None:
            return self.settle(planned).executable
        self.may_borrow = False
        self._unprofile()
        return self._begun(inputs).executable

    def _unplanned(self, profiling: Profiling, resident_bytes: int) -> Executable:
        """The profiling executable; the one of `Keeping` if no backward calls come and it fits."""
        if not (self.status.undifferentiated and self.may_keep):
            return profiling.executable
        keeping = profiling.keeping
        if keeping is None or keeping.checked == self.confirmed:
            plans, profiled = self.engine.plans, profiling.program
            program, most = plans.forward_only_program(self, resident_bytes, profiled)
            keeping = begin_keeping(
                self.captured, program, most, self.engine.driver, checked=not self.confirmed
            )
            profiling.keeping = keeping
            self.engine.contention.tell(self)
            self.engine.metering.forget_peak()
        room = keeping.most_resident_bytes - resident_bytes
        if room < 0:
            return profiling.executable
        keeping.most_allocated_bytes = room + (self.engine.residency.allocated_bytes() or 0)
        return keeping.executable

    def _keeps_on(self, keeping: Keeping | None) -> TypeGuard[Keeping]:
        """Whether no backward calls come, and the allocator's count shows room for `keeping`."""
        if keeping is None or keeping.checked == self.confirmed:
            return False
        if not (self.status.undifferentiated and self.may_keep):
            return False
        level = self.engine.residency.allocated_bytes()
        return level is not None and level <= keeping.most_allocated_bytes

    def _follows_the_unplanned(self, profiling: Profiling) -> bool:
        """Whether a graph with an outstanding call should be planned first, and still may be."""
        waiting = self.engine.registry.outstanding(self)
        first = any(g.profiling is not None and not g.status.settled for g in waiting)
        return first and self._is_patient(profiling)

    def _awaits_others(self, profiling: Profiling) -> bool:
        """Whether to wait until it is known how little another graph's outstanding calls need.

        Such a graph is still profiled, so its least memory is unknown.
        """
        active = self.engine.registry.active()
        others = (g for g in active if g in self.observed and not g.status.settled)
        unknown = any(g.profiling is not None and not g.profiling.done for g in others)
        return unknown and self._is_patient(profiling)

    def _how_others_stand(self) -> frozenset[object]:
        """What a new attempt to plan depends on: other graphs' plans, and which can be planned."""
        others = (g for g in self.engine.registry.active() if g is not self)
        return frozenset(
            (ref(g), id(g.planned), g.profiling is not None and g.profiling.done) for g in others
        )

    def _is_patient(self, profiling: Profiling) -> bool:
        return profiling.timed_steps < PATIENCE * self.status.most_outstanding

    def _hold_against(self, execution: PlannedExecution, inputs: list[Any]) -> None:
        """Drop an adopted plan that has no room for the external memory held now."""
        execution.adopted = False
        if not self.engine.plans.still_fits(execution.planned, self, inputs):
            self.status.unsettle()
            self.execution = None

    def _leave_layout(self, execution: PlannedExecution) -> None:
        """If the plan's layout does not work, profile again, for a plan without a layout."""
        if self.engine.placing.is_in_vain(execution.planned.layout):
            self.engine.plans.planner.solver.places = False
            self.status.unsettle()
            self._unfollow()
            self.tightened = False  # unlike other new plans, the next one starts from a profile

    def _followed(self, execution: PlannedExecution, waiting: int, inputs: list[Any]) -> Executable:
        """The executable of the plan or of its trial; plans again first if there is a reason to.

        `waiting`: outstanding calls of the graph, this one included.
        """
        if waiting == 1:
            contention = self.engine.contention
            execution = contention.beside_calls(self, self._tried(execution))
            execution = contention.leaving_more(self, execution)
            if execution.trial is None:
                execution = contention.for_calls(self, execution)
            execution = self.engine.growth.replan_if_grown(self, execution, inputs)
        trial = execution.trial_of_step(self)
        return execution.executable if trial is None or trial.done else trial.executable

    def _tried(self, execution: PlannedExecution) -> PlannedExecution:
        """The execution of a new plan if a trial is done: planned from what the trial measured."""
        trial = None if execution.trial is None else execution.trial_of_step(self)
        if trial is None or not trial.done:
            return execution
        return self.settle(self.engine.plan_after(self, trial))

    def _origin(self, inputs: list[Any]) -> Origin:
        beside = (graph.origin for graph in self.engine.registry.outstanding(self))
        weights = weights_of(self.captured.trace, inputs)
        around = frozenset((each.kind, each.weights) for each in beside if each is not None)
        return Origin(self.status.kind, self.status.place, weights, around)

    def _begin(self, inputs: list[Any]) -> Profiling:
        """Begin to profile. Raises InfeasibleError if not even the floor program fits."""
        engine, lent = self.engine, None
        found = engine.lenders.lent(self, inputs) if self.may_borrow and not self.lean else None
        if found is not None:
            lent, most = found
            program = lent.program
        else:
            program, most = engine.plans.floor_program(self, inputs, leanest=self.lean)
        driver, mark, readings = engine.driver, engine.metering.mark, engine.readings
        begun = begin_profiling(self.captured, program, most, driver, readings, mark, lent)
        self.status.lent = lent
        return begun

    def settle(self, planned: Planned) -> PlannedExecution:
        """Follow `planned` from the next step on; returns its execution."""
        generator = self.engine.driver.generator
        trace, layout = self.captured.trace, planned.layout
        executable = build(trace, planned.program, generator, layout=layout)
        self.status.settle(planned)
        self.observed.unchecked = True
        self.engine.contention.tell(self)
        self._unfollow()
        self._unprofile()
        self.captured = replace(self.captured, joint=None)
        self.execution = PlannedExecution(planned, executable)
        return self.execution

    def _unprofile(self) -> None:
        """Forget the profile, and what its steps run."""
        self.profiling = self.status.lent = None

    def _unfollow(self) -> None:
        if self.execution is not None:
            self.execution.end(self)
            self.execution = None

    def _wants_meter(self, executable: Executable) -> bool:
        if self.status.undifferentiated:
            return False
        if self.execution is not None and executable is self.execution.executable:
            return self.engine.metering.wants_peak(self) and self._is_first()
        pausing = self.profiling is not None and self.profiling.wants_pause
        return self.checks(executable) or (pausing and self.times(executable))

    def _is_first(self) -> bool:
        """Whether no other planned graph has an outstanding call, so that the step begins here."""
        return all(graph.planned is None for graph in self.engine.registry.outstanding(self))

    # ---- a graph that does not behave as captured -----------------------------------------------

    def correct(self, error: CaptureError) -> None:
        """Correct the trace from what a kernel really returned, or run in-core from now on."""
        self.confirmed, self.status.steps_without_backward = False, 0
        try:
            self.captured = self._corrected(error)
        except CaptureError as final:
            self._give_up(final)
        self._unprofile()

    def _corrected(self, error: CaptureError) -> Captured:
        """The graph as it really behaves. Raises CaptureError if that cannot be determined."""
        self.corrections += 1
        if not isinstance(error, MismatchError) or self.corrections > len(self.captured.trace.ops):
            raise error
        try:
            captured = capture_again(self.captured, error.op, error.real)
            verify_trace(captured.trace)
        except CaptureError as deeper:
            reason = f"{error.reason}; {deeper.reason}"
            raise CaptureError(reason=reason, site=error.site) from deeper
        return captured

    # ---- after a step ---------------------------------------------------------------------------

    def _finish(self, executable: Executable, visit: Visit) -> None:
        execution = self.execution
        if execution and (recording := execution.recording_by(executable)):
            execution.end_recording(self, recording, visit)
            return
        session = self.engine.metering.session
        elsewhere = visit.thread is not threading.current_thread()
        visit.ran = executable
        if elsewhere and self.engine.device.type == "cpu":
            if self.profiling is not None and executable is self.profiling.checked:
                reason = (
                    "its backward runs on another thread than its forward, and cannot be metered"
                )
                self._give_up(CaptureError(reason=reason))
        elif session is not None and session.sees(visit):
            session.visits.append(visit)
            if self.profiling is not None and self.times(executable):
                self.profiling.timed_steps += 1  # another graph may be metered for many steps
        elif execution and executable is execution.executable and visit.once:
            if not visit.evicted:
                self.status.note(tuple(visit.work))
        elif execution and (trial := execution.trial_by(executable)):
            trial.steps += visit.once
        elif self.profiling is not None and self.times(executable):
            self.profiling.timed_steps += 1

    def unmetered(self, obstacle: Obstacle) -> None:
        """Note that a step could not be metered.

        After too many, while workspaces are not known, warn or run in-core (`_give_up`).
        """
        self.obstacles[obstacle] += 1
        if self.profiling is None or self.obstacles[obstacle] < obstacle.most:
            return
        if self.profiling.workspace_bytes is not None:
            return  # workspaces are known: planning can do without this reading
        if not obstacle.passes:
            self._give_up(CaptureError(reason=obstacle.reason))
        elif self.status.reason != obstacle.reason:
            self.status.reason = obstacle.reason
            warnings.warn(STILL_PROFILED.format(reason=obstacle.reason), stacklevel=2)

    def paused(
        self, interlude: Interlude, calls: Mapping[PlannedGraph, int], peak_bytes: Callable[[], int]
    ) -> None:
        """Record the most bytes held between two calls while a call of this graph was outstanding.

        Called after a metered step. `calls`: outstanding calls by graph; `peak_bytes()`: that most.
        """
        self.engine.observer.paused(self, interlude, calls, peak_bytes)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Record what the meter saw of the step that `visit` belongs to."""
        self.obstacles.clear()
        if self.profiling is not None:
            self.status.reason = ""
            self.profiling.metered(reading, visit)
            beyond = reading.peak_bytes(visit.backward_stop) - max(0, reading.last_bytes)
            status = self.status
            status.after_beyond_bytes = max(status.after_beyond_bytes, beyond)

    @contextlib.contextmanager
    def telling_of_memory(self) -> Iterator[None]:
        """In this context, an out-of-memory error gets notes, and the next step a tighter plan."""
        try:
            yield
        except RuntimeError as error:
            if says_memory(error):
                self.plan_tighter(error)
            raise

    def plan_tighter(self, error: RuntimeError) -> None:
        """Make a plan that leaves more memory free for the next step, once; note it on `error`.

        A graph without a plan is profiled with the leanest program instead.
        """
        planned = self.planned
        self.engine.driver.drain()
        if self.retired:
            return
        if planned is None:
            hope = (
                "" if self.lean else "; the next step is profiled by the plan with the least memory"
            )
            error.add_note(
                "outcore is still profiling, within a budget of "
                f"{format_bytes(self.engine.settings.budget_bytes)}: lower it if the device has "
                f"less memory free, or use a smaller batch{hope}"
            )
            self.lean = True
            self._unprofile()
            return
        numbers = (
            f"outcore's plan needs {format_bytes(planned.peak_bytes)} at most, of "
            f"a budget of {format_bytes(planned.problem.budget_bytes)}, including all that the "
            "process held when the plan was made"
        )
        hope = "there will be no tighter plan: lower the budget"
        if not self.tightened:
            self.tightened = True
            with contextlib.suppress(OutcoreError, MemoryError):
                self.settle(self.engine.plans.tighter(self, planned))
                hope = "the next step has a tighter plan"
        error.add_note(f"{numbers}; {hope}")

    def retire(self, reason: str) -> None:
        """Run in-core from now on, without a warning."""
        self.status.state, self.status.reason = State.IN_CORE, reason
        self._unfollow()
        self._unprofile()
        self.retired = True
        self.engine.contention.tell(self)
        self.captured = replace(self.captured, joint=None)

    def _give_up(self, error: CaptureError) -> None:
        """Run in-core from now on. Warns, or with `strict` raises `error`."""
        self.retire(str(error))
        if self.engine.strict:
            raise error
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)
