"""PlannedGraph: one captured graph, from its first profiled step to its planned ones.

The first steps run the floor program (the least memory that surely fits): one is checked against
the trace and metered, the next are timed. Then the graph is planned once, and runs the plan.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from outcore.capture import Captured, keeps_graph, stand_in_survives
from outcore.errors import CaptureError
from outcore.execute import Executable, Instruments, MismatchError, build, checker
from outcore.ir.profile import Profile, Source
from outcore.ir.store import digest
from outcore.ir.verify import verify_trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.session import Replay, Visit
from outcore.runtime.store import Store, versions_of

if TYPE_CHECKING:  # the engine holds graphs, and a graph calls its engine
    from outcore.runtime.engine import Engine, Planned

log = logging.getLogger("outcore")

TIMED_STEPS = 3
"""Steps that are timed, after the one that is checked and metered."""


class State(Enum):
    """What a graph is doing."""

    PROFILING = "profiling"
    PLANNED = "planned"
    IN_CORE = "in-core"


@dataclass(slots=True)
class Profiling:
    """The floor program's runs, and what they gave so far."""

    checked: Executable
    timed: Executable
    first: Stopwatch
    """Notes of the checked run, to place the meter's events."""
    stopwatch: Stopwatch
    workspace_bytes: tuple[int, ...] | None = None
    between_bytes: int = 0
    """What the rest of the step takes at most while the graph waits, beyond `lingering_bytes`."""
    lingering_bytes: int = 0
    """What the rest of the step still holds when backward begins, the tangents left out."""
    resident_bytes: int = 0
    """The most that was held besides the graph's own buffers when a forward call began."""
    timed_steps: int = 0

    @property
    def done(self) -> bool:
        """Whether there is enough to plan from."""
        return self.workspace_bytes is not None and self.timed_steps >= TIMED_STEPS


class PlannedGraph:
    """The two calls that stand for a graph's forward and backward."""

    def __init__(
        self,
        engine: Engine,
        captured: Captured,
        saved_inputs: tuple[int, ...],
        fallback: Executable,
    ) -> None:
        self.engine, self.captured, self.saved_inputs = engine, captured, saved_inputs
        self.fallback = fallback
        self.digest = digest(captured.trace)
        self.last_call = 0
        self.state = State.PROFILING
        self.profiling: Profiling | None = None
        self.planned: Planned | None = None
        self.executable: Executable | None = None
        self.most_outstanding = 1
        """The most calls of this graph that waited for their backward at once."""
        self.before: tuple[PlannedGraph, ...] = ()
        """Graphs whose backward is outstanding when this one's forward begins."""
        self.recent_seconds: deque[float] = deque(maxlen=64)
        self.reason = ""

    def adopt(self, twin: PlannedGraph) -> None:
        """Take over the plan of a graph with the same trace."""
        if twin.planned is None:
            return
        self.planned, self.before = twin.planned, twin.before
        self._settle(twin.planned)

    # ---- the two calls --------------------------------------------------------------------------

    def forward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's forward: the results, the saved inputs, and the stand-in."""
        inputs = list(args)
        args.clear()
        self.engine.calls += 1
        self.last_call = self.engine.calls
        self.engine.end_session(self)
        executable = self._ready(inputs)
        self.engine.begin_session(self, wanted=self._wants_meter(executable))
        visit = Visit(self, self._replay_of(executable, inputs))
        start = time.perf_counter()
        try:
            results, store = self._run_forward(executable, inputs, visit)
        except CaptureError as error:
            self._learn(error, visit)
            return self.forward(inputs)
        visit.seconds = time.perf_counter() - start
        visit.forward_stop = time.time_ns()
        stand_in = self.engine.stores.add(store, follow=stand_in_survives())
        return [*results, *(inputs[i] for i in self.saved_inputs), stand_in]

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """AOTAutograd's backward: the gradients."""
        saved = len(self.saved_inputs)
        stand_in, tangents = args[saved], args[saved + 1 :]
        args.clear()
        store = self.engine.stores.find(stand_in)
        store.check_versions()
        visit = store.visit
        again = keeps_graph()
        given = list(tangents) if visit.replay is not None else []
        visit.backward_start, start = time.time_ns(), time.perf_counter()
        try:
            crossing = list(store.crossing) if again else store.crossing
            gradients = store.executable.backward(crossing, tangents, store.lane)
        except CaptureError as error:
            state = self.engine.driver.generator.get_state()
            self._learn(error, visit)
            gradients = self._run_again(visit, given)
            self.engine.driver.generator.set_state(state)
        finally:
            if not again:
                self.engine.stores.drop(store.number)
        visit.seconds += time.perf_counter() - start
        visit.backward_stop = time.time_ns()
        self._finish(store.executable, visit)
        return gradients

    # ---- before a step --------------------------------------------------------------------------

    def _ready(self, inputs: list[Any]) -> Executable:
        """The executable for this step; plans first where enough is known."""
        self.before = self.engine.outstanding(self)
        waiting = 1 + self.engine.waiting(self)
        self.most_outstanding = max(self.most_outstanding, waiting)
        if self.executable is not None:
            return self.executable
        if self.profiling is None:
            self.profiling = self._begin(inputs)
        resident = self.engine.resident_besides(self, inputs)
        self.profiling.resident_bytes = max(self.profiling.resident_bytes, resident)
        if not self.profiling.done:
            unmetered = self.profiling.workspace_bytes is None
            return self.profiling.checked if unmetered else self.profiling.timed
        return self._plan(self.profiling)

    def _begin(self, inputs: list[Any]) -> Profiling:
        program = self.engine.floor_program(self, inputs)
        first, stopwatch = Stopwatch(program), Stopwatch(program)
        trace, generator = self.captured.trace, self.engine.driver.generator
        instruments = Instruments(timed=True, checked=True)
        checked = build(trace, program, generator, instruments, first.note, checker(trace))
        timed = build(trace, program, generator, Instruments(timed=True), stopwatch.note)
        return Profiling(checked, timed, first, stopwatch)

    def _plan(self, profiling: Profiling) -> Executable:
        trace = self.captured.trace
        seconds = profiling.stopwatch.seconds(len(trace.ops))
        assert profiling.workspace_bytes is not None  # noqa: S101 - `done` says so
        profile = Profile(seconds, profiling.workspace_bytes, Source.MEASURED)
        self.planned = self.engine.plan(self, profile, profiling)
        return self._settle(self.planned)

    def _settle(self, planned: Planned) -> Executable:
        trace = self.captured.trace
        self.state = State.IN_CORE if planned.everything_kept else State.PLANNED
        self.executable = build(trace, planned.program, self.engine.driver.generator)
        self.profiling = None
        return self.executable

    def _wants_meter(self, executable: Executable) -> bool:
        checked = self.profiling is not None and executable is self.profiling.checked
        return checked or (self.planned is not None and self.engine.measured_peak_bytes is None)

    def _run_forward(
        self, executable: Executable, inputs: list[Any], visit: Visit
    ) -> tuple[tuple[Any, ...], Store]:
        lane = self.engine.driver.open_lane(executable.regions)
        arguments = [*inputs, *self.captured.constants]
        try:
            results, crossing = executable.forward(arguments, lane)
        except BaseException:
            lane.close()
            raise
        versions = versions_of(crossing, [inputs[i] for i in self.captured.overwritten])
        return results, Store(visit, executable, lane, crossing, versions)

    # ---- a graph that is not as captured --------------------------------------------------------

    def _replay_of(self, executable: Executable, inputs: list[Any]) -> Replay | None:
        if self.profiling is None or executable is not self.profiling.checked:
            return None
        return Replay(tuple(inputs), self.engine.driver.generator.get_state())

    def _learn(self, error: CaptureError, visit: Visit) -> None:
        """Correct the trace by what a kernel really returned, or run in-core from now on."""
        if visit.replay is None:
            raise error
        try:
            if not isinstance(error, MismatchError):
                raise error
            trace = error.corrected(self.captured.trace)
            verify_trace(trace)
            self.captured = replace(self.captured, trace=trace)
        except CaptureError as final:
            self._give_up(final)
        self.profiling = None
        self.engine.driver.generator.set_state(visit.replay.generator_state)

    def _run_again(self, visit: Visit, tangents: list[Any]) -> tuple[Any, ...]:
        """Forward and backward once more from the visit's inputs: the first time was not right."""
        assert visit.replay is not None  # noqa: S101 - `_learn` raises without one
        inputs = list(visit.replay.inputs)
        executable = self._ready(inputs)
        try:
            _, store = self._run_forward(executable, inputs, visit)
            try:
                return executable.backward(store.crossing, list(tangents), store.lane)
            finally:
                store.release()
        except CaptureError as error:
            self._learn(error, visit)
            return self._run_again(visit, tangents)

    # ---- after a step ---------------------------------------------------------------------------

    def _finish(self, executable: Executable, visit: Visit) -> None:
        visit.replay = None
        if self.engine.session is not None:
            self.engine.session.visits.append(visit)
        elif executable is self.executable:
            self.recent_seconds.append(visit.seconds)
        elif self.profiling is not None and executable is self.profiling.timed:
            self.profiling.timed_steps += 1

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces, and what the rest of the step needs between the two calls."""
        profiling = self.profiling
        if profiling is None or profiling.workspace_bytes is not None:
            return
        spans = (profiling.first.last(op) for op in range(len(self.captured.trace.ops)))
        profiling.workspace_bytes = tuple(reading.workspace_bytes(a, b) for a, b in spans)
        trace = self.captured.trace
        tangents = sum(trace.buffers[trace.values[v].buffer].nbytes for v in trace.tangents)
        waiting = reading.level_bytes(visit.forward_stop)
        lingering = reading.level_bytes(visit.backward_start) - waiting - tangents
        peak = reading.peak_bytes(visit.forward_stop, visit.backward_start)
        profiling.lingering_bytes = max(0, lingering)
        profiling.between_bytes = max(0, peak - waiting - profiling.lingering_bytes)

    def _give_up(self, error: CaptureError) -> None:
        """Run in-core from now on: the graph does not behave as it was captured."""
        self.state, self.executable, self.profiling = State.IN_CORE, self.fallback, None
        self.reason = str(error)
        if self.engine.strict:
            raise error
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)
