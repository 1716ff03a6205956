"""PlannedGraph: one captured graph, from its first profiled step to its planned ones.

The first steps run the floor program (the least memory that surely fits): one (on a GPU two) is
checked against the trace and metered, the next are timed. Then the graph is planned once, and runs
the plan.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch

from outcore.capture import Captured, keeps_graph, stand_in_survives
from outcore.errors import CaptureError, OutcoreError
from outcore.execute import Executable, Instruments, MismatchError, build, checker
from outcore.gauges import Moment
from outcore.ir.hardware import Tier
from outcore.ir.profile import Profile, Source
from outcore.ir.store import digest
from outcore.ir.verify import verify_trace
from outcore.measure import Reading, Stopwatch
from outcore.runtime.session import Replay, Visit
from outcore.runtime.store import Store, versions_of
from outcore.units import format_bytes

if TYPE_CHECKING:  # the engine holds graphs, and a graph calls its engine
    from outcore.runtime.engine import Engine, Planned

log = logging.getLogger("outcore")

TIMED_STEPS = 3
"""Steps that are timed, after the one that is checked and metered."""

MOST_FRUITLESS = 4
"""Forward calls in a row that are metered in vain; then the meter waits for a backward call."""


class State(Enum):
    """What a graph is doing."""

    PROFILING = "profiling"
    PLANNED = "planned"
    IN_CORE = "in-core"


@dataclass(slots=True)
class Standing:
    """How far a graph has come, for the report. It holds no tensors, and may outlive its graph."""

    state: State = State.PROFILING
    planned: Planned | None = None
    recent_work: deque[tuple[tuple[Moment, Moment], ...]] = field(
        default_factory=lambda: deque(maxlen=64)
    )
    """Of the latest planned steps: from when to when each call ran, by the driver's clock."""
    last_call: int = 0
    """Number of its last forward call, counted over the engine's graphs."""
    reason: str = ""
    """Why it runs in-core, where it was not planned."""

    @property
    def settled(self) -> bool:
        """Whether it will run from now on as it runs now."""
        return self.state is not State.PROFILING


@dataclass(slots=True)
class Profiling:
    """The floor program's runs, and what they gave so far."""

    checked: Executable
    timed: Executable
    first: Stopwatch
    """Notes of the checked run, to place the meter's events."""
    stopwatch: Stopwatch
    readings: int = 0
    """Steps that were checked and metered."""
    latest: Reading | None = None
    """That of the last of them."""
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
    """The two calls that stand for a graph's forward and backward.

    Only what torch compiled holds it: it dies, with its constants, when torch drops that code.
    """

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
        self.standing = Standing()
        self.profiling: Profiling | None = None
        self.executable: Executable | None = None
        self.adopted = False
        """Whether its plan was made for another graph, and has not been held against this one."""
        self.most_outstanding = 1
        """The most calls of this graph that waited for their backward at once."""
        self.before: WeakSet[PlannedGraph] = WeakSet()
        """Graphs whose backward is outstanding when this one's forward begins."""
        self.tightened = False
        """Whether its plan was made again for want of device memory."""
        self.fruitless = 0
        """Sessions begun in a row that no backward call followed."""

    @property
    def planned(self) -> Planned | None:
        """Its plan, once it has one."""
        return self.standing.planned

    def __deepcopy__(self, _: dict[int, Any]) -> PlannedGraph:
        """Itself: AOTAutograd copies modules, and the copies stand for the same graph."""
        return self

    def adopt(self, planned: Planned) -> None:
        """Take over the plan of a graph with the same trace, and what its kernels corrected."""
        self.captured = replace(self.captured, trace=planned.problem.trace)
        self._settle(planned)
        self.adopted = True

    # ---- the two calls --------------------------------------------------------------------------

    def forward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's forward: the results, the saved inputs, and the stand-in."""
        inputs = list(args)
        args.clear()
        self.engine.calls += 1
        self.standing.last_call = self.engine.calls
        self.engine.next_step(self)
        executable = self._ready(inputs)
        if self._wants_meter(executable):
            self.fruitless += self.engine.begin_session(self)
        visit = Visit(ref(self), self._replay_of(executable, inputs))
        clock = self.engine.driver.clock
        start = clock.now()
        try:
            results, store = self._run_forward(executable, inputs, visit)
        except CaptureError as error:
            return self.forward(self._learn(error, visit))
        except torch.OutOfMemoryError as error:
            self._plan_tighter(error)
            raise
        visit.work.append((start, clock.now()))
        visit.forward_stop = time.time_ns()
        stand_in = self.engine.stores.add(store, follow=stand_in_survives())
        return [*results, stand_in]

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """AOTAutograd's backward: the gradients."""
        saved = len(self.saved_inputs)
        stand_in, tangents = args[saved], args[saved + 1 :]
        args.clear()
        store = self.engine.stores.find(stand_in)
        store.check_versions()
        self.fruitless = 0
        visit = store.visit
        again = keeps_graph()
        given = list(tangents) if visit.replay is not None else []
        clock = self.engine.driver.clock
        visit.backward_start, start = time.time_ns(), clock.now()
        try:
            crossing = list(store.crossing) if again else store.crossing
            gradients = store.executable.backward(crossing, tangents, store.lane)
        except CaptureError as error:
            state = self.engine.driver.generator.get_state()
            gradients = self._run_again(visit, self._learn(error, visit), given)
            self.engine.driver.generator.set_state(state)
        except torch.OutOfMemoryError as error:
            self.engine.stores.drop(store.number)  # its memory counts
            self._plan_tighter(error)
            raise
        finally:
            if not again:
                self.engine.stores.drop(store.number)
        visit.work.append((start, clock.now()))
        visit.backward_stop = time.time_ns()
        self._finish(store.executable, visit)
        return gradients

    # ---- before a step --------------------------------------------------------------------------

    def _ready(self, inputs: list[Any]) -> Executable:
        """The executable for this step; plans first where enough is known."""
        self.before = WeakSet(self.engine.outstanding(self))
        waiting = 1 + self.engine.waiting(self)
        self.most_outstanding = max(self.most_outstanding, waiting)
        if self.adopted:
            self._hold_against(inputs)
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

    def _hold_against(self, inputs: list[Any]) -> None:
        """Forget an adopted plan that was made when less was held besides the graph."""
        self.adopted = False
        planned = self.standing.planned
        if planned is not None and not self.engine.still_fits(planned, self, inputs):
            self.standing.planned, self.executable = None, None
            self.standing.state = State.PROFILING

    def _begin(self, inputs: list[Any]) -> Profiling:
        program = self.engine.floor_program(self, inputs)
        driver, trace = self.engine.driver, self.captured.trace
        clock, generator = driver.clock, driver.generator
        first, stopwatch = Stopwatch(program, clock), Stopwatch(program, clock)
        instruments = Instruments(timed=True, checked=True)
        checked = build(
            trace, program, generator, instruments, first.note, checker(trace), clock.now
        )
        timed = build(
            trace, program, generator, Instruments(timed=True), stopwatch.note, clock=clock.now
        )
        return Profiling(checked, timed, first, stopwatch)

    def _plan(self, profiling: Profiling) -> Executable:
        trace = self.captured.trace
        seconds = profiling.stopwatch.seconds(len(trace.ops))
        assert profiling.workspace_bytes is not None  # noqa: S101 - `done` says so
        profile = Profile(seconds, profiling.workspace_bytes, Source.MEASURED)
        return self._settle(self.engine.plan(self, profile, profiling))

    def _settle(self, planned: Planned) -> Executable:
        trace = self.captured.trace
        self.standing.planned = planned
        self.standing.recent_work.clear()
        self.standing.state = State.IN_CORE if planned.everything_kept else State.PLANNED
        self.executable = build(trace, planned.program, self.engine.driver.generator)
        self.profiling = None
        return self.executable

    def _wants_meter(self, executable: Executable) -> bool:
        if self.fruitless >= MOST_FRUITLESS:
            return False
        checked = self.profiling is not None and executable is self.profiling.checked
        return checked or (self.planned is not None and self.engine.wants_peak())

    def _run_forward(
        self, executable: Executable, inputs: list[Any], visit: Visit
    ) -> tuple[list[Any], Store]:
        """The results and the saved inputs. Empties `inputs`, so that each can die on the way."""
        lane = self.engine.driver.open_lane(executable.regions)
        saved = [inputs[i] for i in self.saved_inputs]
        overwritten = [inputs[i] for i in self.captured.overwritten]
        arguments = [*inputs, *self.captured.constants]
        inputs.clear()
        try:
            results, crossing = executable.forward(arguments, lane)
        except BaseException:
            lane.close()
            raise
        versions = versions_of(crossing, overwritten)
        return [*results, *saved], Store(visit, executable, lane, crossing, versions)

    # ---- a graph that is not as captured --------------------------------------------------------

    def _replay_of(self, executable: Executable, inputs: list[Any]) -> Replay | None:
        if self.profiling is None or executable is not self.profiling.checked:
            return None
        return Replay(tuple(inputs), self.engine.driver.generator.get_state())

    def _learn(self, error: CaptureError, visit: Visit) -> list[Any]:
        """Correct the trace by what a kernel really returned, or run in-core from now on.

        Returns the inputs to begin again with.
        """
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
        return list(visit.replay.inputs)

    def _run_again(self, visit: Visit, inputs: list[Any], tangents: list[Any]) -> tuple[Any, ...]:
        """Forward and backward once more: the first time was not right."""
        executable = self._ready(inputs)
        try:
            _, store = self._run_forward(executable, inputs, visit)
            try:
                return executable.backward(store.crossing, list(tangents), store.lane)
            finally:
                store.release()
        except CaptureError as error:
            return self._run_again(visit, self._learn(error, visit), tangents)

    # ---- after a step ---------------------------------------------------------------------------

    def _finish(self, executable: Executable, visit: Visit) -> None:
        visit.replay = None
        session = self.engine.session
        elsewhere = visit.thread is not threading.current_thread()
        if elsewhere and self.engine.device.type == "cpu":
            if self.profiling is not None and executable is self.profiling.checked:
                reason = "its backward runs on another thread than its forward, unseen by the meter"
                self._give_up(CaptureError(reason=reason))
        elif session is not None and session.sees(visit):
            session.visits.append(visit)
        elif executable is self.executable:
            self.standing.recent_work.append(tuple(visit.work))
        elif self.profiling is not None and executable is self.profiling.timed:
            self.profiling.timed_steps += 1

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the workspaces, and what the rest of the step needs between the two calls."""
        profiling = self.profiling
        if profiling is None or profiling.workspace_bytes is not None:
            return
        if reading is not profiling.latest:
            profiling.latest, profiling.readings = reading, profiling.readings + 1
        if profiling.readings < self.engine.readings:
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

    def _plan_tighter(self, error: torch.OutOfMemoryError) -> None:
        """Let the next step have a plan that leaves more free, once; say so with the error."""
        planned = self.planned
        self.engine.driver.drain()
        if planned is None:
            error.add_note(
                "outcore is profiling, with as little device memory as it can: of a budget of "
                f"{format_bytes(self.engine.settings.budget_bytes)}; lower it if the device has "
                "less to spare, or make the batch smaller"
            )
            return
        numbers = (
            f"outcore's plan takes {format_bytes(planned.predicted.peak(Tier.DEVICE))} at most, of "
            f"a budget of {format_bytes(planned.problem.budget_bytes)}, all that was held besides "
            "it when it was made included"
        )
        hope = "it will not be made tighter: lower the budget"
        if not self.tightened:
            self.tightened = True
            with contextlib.suppress(OutcoreError):
                self._settle(self.engine.plan_tighter(self, planned))
                hope = "the next step has a tighter one"
        error.add_note(f"{numbers}; {hope}")

    def _give_up(self, error: CaptureError) -> None:
        """Run in-core from now on: the graph does not behave as it was captured."""
        self.standing.state, self.standing.reason = State.IN_CORE, str(error)
        self.executable, self.profiling = self.fallback, None
        if self.engine.strict:
            raise error
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)
