"""PlannedExecution: how a planned graph runs its steps, some of them under instruments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outcore.execute import Executable
from outcore.gauges import Moment
from outcore.runtime.drift import Watch
from outcore.runtime.planned import Planned
from outcore.runtime.recording import Recording
from outcore.runtime.trial import Trial

if TYPE_CHECKING:  # a graph follows its plan
    from outcore.runtime.graph import PlannedGraph


@dataclass(slots=True, eq=False)
class PlannedExecution:
    """A plan and its executable, and the same under instruments for some steps."""

    planned: Planned
    executable: Executable
    adopted: bool = False
    """Whether the plan was made for another graph, and has not been held against this one."""
    foreseen_bytes: int | None = None
    """What the allocator has given out as a call begins, but for what waiting calls of other graphs
    hold, at most if no more is held than was planned for (`Growth`). None: not known."""
    watch: Watch = field(default_factory=Watch)
    trial: Trial | None = None
    """The plan under instruments: it takes another time than predicted."""
    recording: Recording | None = None
    """The plan under instruments for one step: somebody asked."""

    def trial_of_step(self, graph: PlannedGraph) -> Trial | None:
        """The trial under way: one begins where the plan's time drifts and it may improve.

        None too where it took too long.
        """
        engine = graph.engine
        if self.trial is not None:
            self.trial = self.trial if engine.trials.hears(self.trial) else None
        elif self.watch.due(graph.status.steps) and self.planned.may_improve:
            self.trial = None if engine.registry.waiting(graph) else engine.begin_trial(graph)
        return self.trial

    def executable_of_step(self, graph: PlannedGraph) -> Executable:
        """The executable, or the same under instruments where somebody asked for a recording.

        While a call waits for its backward, a recording may be under way: that is left alone.
        """
        if graph.engine.registry.waiting(graph):
            return self.executable
        self.recording = graph.engine.begin_recording(graph)
        return self.executable if self.recording is None else self.recording.executable

    def recording_by(self, executable: Executable) -> Recording | None:
        """The recording that is made with `executable`, if it is."""
        recording = self.recording
        return recording if recording is not None and recording.executable is executable else None

    def trial_by(self, executable: Executable) -> Trial | None:
        """The trial that is made with `executable`, if it is."""
        trial = self.trial
        return trial if trial is not None and trial.executable is executable else None

    def end_recording(self, graph: PlannedGraph, recording: Recording, backward: Moment) -> None:
        """Hand the recording over, whose step is through its backward call, begun at `backward`."""
        self.recording, graph.recorded = None, graph.engine.recorder.asked
        recording.backward = backward
        graph.engine.recorder.finish(graph, recording)

    def end(self, graph: PlannedGraph) -> None:
        """Take all instruments away: the plan is followed no more."""
        graph.engine.trials.end(self.trial)
        if self.recording is not None:
            graph.engine.recorder.drop(self.recording)
