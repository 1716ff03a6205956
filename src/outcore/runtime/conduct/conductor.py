"""Conductor: chooses what each call of one graph runs, and records what the call shows.

The first steps run the floor program (it needs little memory, and is sure to fit) and are profiled
(`FirstSteps`). Then the graph is planned, and its steps run the plan (`PlannedSteps`). It is
planned again if step times drift, if device memory runs out, or if the plan has too little room for
what else is held.

A forward call is outstanding until its backward call begins: then it comes back. External memory is
what the process holds that is not the graph's own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from outcore.errors import CaptureError, OutcoreError
from outcore.execute import Executable
from outcore.measure import says_memory
from outcore.runtime.budget.engine import Engine
from outcore.runtime.conduct.first_steps import FirstSteps
from outcore.runtime.conduct.planned_steps import PlannedSteps
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import Origin, weights_of
from outcore.runtime.step.store import Store
from outcore.runtime.step.visit import Visit
from outcore.units import format_bytes


class Conductor:
    """Between the calls of one graph and the engine that it shares with others."""

    def __init__(self, engine: Engine, graph: PlannedGraph) -> None:
        self.engine, self.graph = engine, graph
        self._first_steps = FirstSteps(engine, graph)
        self._planned_steps = PlannedSteps(engine, graph)

    # ---- around the two calls -------------------------------------------------------------------

    def begin_call(self) -> None:
        """Note that a forward call begins."""
        if not self.engine.registry.runs(self.graph):
            self.engine.registry.tell(self.graph)
        self.engine.called(self.graph)

    def executable_for(self, inputs: list[Any]) -> Executable:
        """Choose the executable for the forward call that began; start the meter if needed."""
        engine, graph = self.engine, self.graph
        with self.telling_of_memory():
            executable = self.ready(inputs)
        execution = graph.execution
        if self._wants_meter(executable):
            engine.metering.begin(graph)  # does nothing if another graph has begun the meter
        elif execution is not None and executable is execution.executable:
            executable = self._planned_steps.recorded(execution)
        if graph.planned is not None and engine.metering.running is not None:
            engine.observer.metered(graph, inputs)
        return executable

    def end_call(self, executable: Executable) -> None:
        """Note that the forward call is over, which `executable` ran to the end."""
        if self._wants_meter(executable):
            status = self.graph.status
            status.returns.missing += self.engine.metering.note_call(self.graph)

    def begin_backward(self, store: Store, tangents: list[Any], *, again: bool) -> None:
        """Note that the call of `store` comes back.

        `again`: this backward call must leave its data for another one (`retain_graph`).
        """
        graph = self.graph
        self.engine.growth.came_back(graph, store.visit)
        graph.status.returns.came(planned=graph.status.planned is not None)
        self.engine.observer.returned(graph, store, tangents)
        graph.status.retained |= again
        self.engine.observer.waited(graph, store.visit, tangents)

    def end_backward(self, executable: Executable, visit: Visit) -> None:
        """Record `visit`, whose backward call has just been run by `executable`."""
        graph, steps = self.graph, self.engine.steps
        checked = graph.compares(executable)
        graph.confirmed |= checked
        steps.returns += 1
        if visit.once:
            graph.status.history.came_back(steps.number, steps.calls)
        unsettled = not graph.status.settled
        self._record(executable, visit)
        if graph.confirmed and unsettled:
            self.engine.plans.check_known(graph, checked=True)

    def ready(self, inputs: list[Any], *, again: bool = False) -> Executable:
        """The executable for this step. Plans the graph first if enough is known.

        `again`: the call is outstanding already, and does not count as another one.
        """
        graph, status = self.graph, self.graph.status
        self._planned_steps.hold_against(inputs)
        own = self.engine.registry.waiting(graph) - again
        if not self.engine.registry.awaits(graph):
            self._planned_steps.leave_layout()
        self.engine.observer.called(graph, own, inputs)
        graph.origin = graph.origin or self._origin(inputs)
        planned = graph.planned is not None
        status.at_once.note(1 + own, self.engine.steps.number, planned=planned)
        if graph.retired:
            return graph.fallback
        if graph.execution is not None:
            return self._planned_steps.executable(graph.execution, inputs)
        return self._first_steps.executable(own, inputs)

    def _origin(self, inputs: list[Any]) -> Origin:
        graph = self.graph
        beside = (other.origin for other in self.engine.registry.outstanding(graph))
        weights = weights_of(graph.captured.trace, inputs)
        around = frozenset((each.kind, each.weights) for each in beside if each is not None)
        return Origin(graph.status.kind, graph.status.place, weights, around)

    # ---- the meter ------------------------------------------------------------------------------

    def _wants_meter(self, executable: Executable) -> bool:
        graph = self.graph
        if graph.status.returns.ceased:
            return False
        if graph.execution is not None and executable is graph.execution.executable:
            return self.engine.metering.wants_peak(graph) and self._is_first()
        pausing = graph.profiling is not None and graph.profiling.waiting.wanted
        return graph.compares(executable) or (pausing and graph.times(executable))

    def _is_first(self) -> bool:
        """Whether no call of another planned graph is awaited, so that the step begins here."""
        registry = self.engine.registry
        others = (g for g in registry.outstanding(self.graph) if g.planned is not None)
        return not any(map(registry.awaits, others))

    def _record(self, executable: Executable, visit: Visit) -> None:
        graph, execution, profiling = self.graph, self.graph.execution, self.graph.profiling
        if execution and (recording := execution.recording_by(executable)):
            execution.end_recording(graph, recording, visit)
            return
        metered, on_cpu = self.engine.metering.running, self.engine.device.type == "cpu"
        elsewhere = on_cpu and visit.thread is not threading.current_thread()
        visit.ran = executable
        if elsewhere and profiling and executable in (profiling.checked, profiling.timed):
            reason = "its backward runs on another thread than its forward, and cannot be metered"
            graph.give_up(CaptureError(reason=reason))
        elif elsewhere and metered is not None:
            return  # the meter saw forward only, and slowed it down
        elif metered is not None and metered.sees(visit):
            metered.visits.append(visit)
            if profiling is not None and graph.times(executable):
                profiling.timings.number += 1  # another graph may be metered for many steps
        elif execution and executable is execution.executable and visit.once:
            if not visit.evicted:
                graph.status.times.note(tuple(visit.work))
        elif execution and (trial := execution.trial_by(executable)):
            trial.steps += visit.once
        elif profiling is not None and graph.times(executable):
            profiling.timings.number += 1

    # ---- if device memory runs out --------------------------------------------------------------

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
        engine, graph = self.engine, self.graph
        planned, starved = graph.planned, engine.placing.take_starved()
        engine.driver.drain()
        if graph.retired:
            return
        if planned is None:
            leanest = "; the next step is profiled by the plan with the least memory"
            error.add_note(
                "outcore is still profiling, within a budget of "
                f"{format_bytes(engine.settings.budget_bytes)}: lower it if the device has "
                f"less memory free, or use a smaller batch{'' if graph.lean else leanest}"
            )
            if graph.profiling is not None and graph.profiling.keeps:
                engine.registry.keeps = False
            graph.lean = True
            graph.unprofile()
            return
        numbers = (
            f"outcore's plan needs {format_bytes(planned.peak_bytes)} at most, of "
            f"a budget of {format_bytes(planned.problem.budget_bytes)}, including all that the "
            "process held when the plan was made"
        )
        hope = "there will be no tighter plan: lower the budget"
        if starved:
            hope = (
                "free memory was held for tensors' planned addresses, and no later plan has those"
            )
        elif not graph.tightened:
            graph.tightened = True
            with contextlib.suppress(OutcoreError, MemoryError):
                graph.settle(engine.plans.tighter(graph, planned))
                hope = "the next step has a tighter plan"
        error.add_note(f"{numbers}; {hope}")
