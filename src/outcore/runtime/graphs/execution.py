"""PlannedExecution: what a planned graph runs, some of it with instruments."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from outcore.execute import Executable
from outcore.runtime.graphs.drift import DriftWatch
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.recording import Recording
from outcore.runtime.graphs.trial import Trial
from outcore.runtime.step.visit import Visit

if TYPE_CHECKING:  # a graph holds its execution
    from outcore.runtime.graphs.graph import PlannedGraph


@dataclass(slots=True, eq=False)
class PlannedExecution:
    """A plan and its executable, and the same program with instruments for some steps."""

    planned: Planned
    executable: Executable
    adopted: bool = False
    """Whether the plan was made for another graph of the same trace, or while the graph was not
    called, and it has not been checked yet that it fits here."""
    foreseen_bytes: int | None = None
    """The most that the allocator may report as a call begins, if no more external memory is held
    than was planned for; without what outstanding calls of other graphs hold (`Growth`). None: not
    known yet."""
    uncounted: int = 0
    """Calls since external memory was last counted."""
    lean: Executable | None = None
    """A program of little memory for calls that find too little room (`Eviction`); None before."""
    lean_elsewhere: Executable | None = None
    """The same for calls that find no room in an outer tier: it offloads elsewhere, or nothing."""
    lean_refused_bytes: float = inf
    """The least that a call lacked when no such program fitted; inf: there was no such call."""
    watch: DriftWatch = field(default_factory=DriftWatch)
    trial: Trial | None = None
    """The trial under way: the plan's steps took another time than predicted."""
    recording: Recording | None = None
    """The recording of one step that is under way: the user requested it."""

    def has(self, executable: object) -> bool:
        """Whether calls under this plan may run `executable`; None is none."""
        timed = None if self.trial is None else self.trial.executable
        ours = (self.executable, self.lean, self.lean_elsewhere, timed)
        return executable is not None and any(executable is each for each in ours)

    def recording_by(self, executable: Executable) -> Recording | None:
        """The recording under way, if `executable` is the one that makes it; else None."""
        recording = self.recording
        return recording if recording is not None and recording.executable is executable else None

    def trial_by(self, executable: Executable) -> Trial | None:
        """The trial under way, if `executable` is the one that it times; else None."""
        trial = self.trial
        return trial if trial is not None and trial.executable is executable else None

    def end_recording(self, graph: PlannedGraph, recording: Recording, visit: Visit) -> None:
        """Hand the recording of `visit` to the recorder.

        If something was moved away meanwhile, or the recorder has dropped it, drop it instead: the
        next step is recorded.
        """
        recorder = graph.equipment.recorder
        if visit.evicted or not recorder.hears(recording):
            self.drop_recording(graph)
            return
        self.recording, graph.recorded = None, recorder.asked
        recording.backward = visit.work[1][0]
        recorder.finish(graph, recording)

    def drop_recording(self, graph: PlannedGraph) -> None:
        """Drop the recording under way, if there is one. The request stays."""
        recording, self.recording = self.recording, None
        if recording is not None:
            graph.equipment.recorder.drop(recording)

    def end(self, graph: PlannedGraph) -> None:
        """End the trial and the recording: the graph no longer follows this plan."""
        graph.equipment.trials.end(self.trial)
        self.drop_recording(graph)
