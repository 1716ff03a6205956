"""planned_steps: what the calls of one graph run once it has a plan, some with instruments."""

from __future__ import annotations

from typing import Any

from outcore.execute import Executable
from outcore.runtime.budget.engine import Engine
from outcore.runtime.graphs.drift import WATCHED_STEPS
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.recording import Recording
from outcore.runtime.graphs.trial import Trial


class PlannedSteps:
    """Runs a graph's plan, and has the graph planned again if there is a reason to."""

    def __init__(self, engine: Engine, graph: PlannedGraph) -> None:
        self.engine, self.graph = engine, graph

    def hold_against(self, inputs: list[Any]) -> None:
        """Drop an adopted plan that has no room for the external memory held now."""
        graph, execution = self.graph, self.graph.execution
        if execution is None or not execution.adopted:
            return
        execution.adopted = False
        if not self.engine.plans.still_fits(execution.planned, graph, inputs):
            graph.status.unsettle()
            graph.unfollow()

    def leave_layout(self) -> None:
        """If the plan's layout does not work, profile again, for a plan without a layout."""
        graph, execution = self.graph, self.graph.execution
        if execution is not None and self.engine.placing.is_in_vain(execution.planned.layout):
            self.engine.plans.leave_layouts()
            graph.status.unsettle()
            graph.unfollow()
            graph.tightened = False  # unlike other new plans, the next one starts from a profile

    def executable(self, execution: PlannedExecution, inputs: list[Any]) -> Executable:
        """The executable of the plan or of its trial; plans again first if there is a reason to.

        Plans nothing while another call of the graph should still come back in this step.
        """
        engine, graph = self.engine, self.graph
        if not engine.registry.awaits(graph):
            execution = engine.contention.beside_calls(graph, self._tried(execution))
            execution = engine.contention.leaving_more(graph, execution)
            if execution.trial is None:
                execution = engine.contention.for_calls(graph, execution)
            execution = engine.growth.replan_if_grown(graph, execution, inputs)
        trial = self._trial_of_step(execution)
        return execution.executable if trial is None or trial.done else trial.executable

    def recorded(self, execution: PlannedExecution) -> Executable:
        """The executable for the next step, with a clock if a recording was requested.

        If a call is outstanding, no recording begins: one may already be under way.
        """
        if self.engine.registry.awaits(self.graph):
            return execution.executable
        execution.recording = recording = self._begin_recording()
        return execution.executable if recording is None else recording.executable

    # ---- under instruments ----------------------------------------------------------------------

    def _tried(self, execution: PlannedExecution) -> PlannedExecution:
        """The execution of a new plan if a trial is done: planned from what the trial measured."""
        trial = None if execution.trial is None else self._trial_of_step(execution)
        if trial is None or not trial.done:
            return execution
        engine, graph = self.engine, self.graph
        engine.driver.drain()  # copies still under way have not been reported
        engine.trials.end(trial)
        return graph.settle(engine.plans.after(graph, trial))

    def _trial_of_step(self, execution: PlannedExecution) -> Trial | None:
        """The trial under way, if any. Begins one if the plan's time drifts and it may improve.

        A trial that took too long has been ended, and gives None.
        """
        engine, graph, trial = self.engine, self.graph, execution.trial
        if trial is not None:
            execution.trial = trial if engine.trials.hears(trial) else None
        elif execution.watch.due(graph.status.times.steps) and execution.planned.may_improve:
            execution.trial = None if engine.registry.awaits(graph) else self._begin_trial()
        return execution.trial

    def _begin_trial(self) -> Trial | None:
        """Time the plan for some steps if its latest steps drifted from the prediction.

        Returns None while a step is metered or recorded, or another trial is under way.
        """
        engine, graph = self.engine, self.graph
        planned, busy = graph.planned, self._busy() or engine.recorder.busy
        if planned is None or busy or engine.settings.drift is None:
            return None
        drift = graph.status.drift(engine.driver.clock, WATCHED_STEPS, done=True)
        if drift is None or not drift.beyond(engine.settings.drift):
            return None
        return engine.trials.begin(graph.captured.trace, planned, drift, engine.steps.number)

    def _begin_recording(self) -> Recording | None:
        """Record the next step if the user requested a recording that the graph has not made.

        Returns None while a step is metered or a trial is under way.
        """
        recorder, graph = self.engine.recorder, self.graph
        if graph.planned is None or graph.recorded >= recorder.asked or self._busy():
            return None
        return recorder.begin(graph, graph.planned, self.engine.steps.number)

    def _busy(self) -> bool:
        return self.engine.trials.busy or self.engine.metering.running is not None
