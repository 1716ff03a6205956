"""PlannedGraph: one captured graph, from its first profiled step to its planned ones.

The first steps run the floor program (the least memory that surely fits), to be profiled. Then the
graph is planned and runs the plan; again, if its time drifts or memory runs out.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from outcore.capture import (
    Captured,
    as_it_lies,
    capture_again,
    is_batched,
    keeps_graph,
    plain,
    stand_in_survives,
)
from outcore.errors import CaptureError, InfeasibleError, OutcoreError, StepError
from outcore.execute import Executable, Lane, MismatchError, build, drawing
from outcore.ir.hardware import Tier
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.ir.verify import verify_trace
from outcore.measure import Reading, says_memory
from outcore.runtime.following import Following
from outcore.runtime.obstacle import Obstacle
from outcore.runtime.planned import Planned
from outcore.runtime.profiling import Profiling, begin_profiling
from outcore.runtime.replay import Replay, replay_of
from outcore.runtime.session import Visit
from outcore.runtime.standing import MOST_FRUITLESS, Standing, State
from outcore.runtime.store import Store, addresses, made_since
from outcore.runtime.versions import versions_of
from outcore.units import format_bytes

if TYPE_CHECKING:  # the engine holds graphs, and a graph calls its engine
    from outcore.runtime.engine import Engine

PATIENCE = 16
"""Timed calls after which a graph is planned though one before it is not: it may never be."""

STILL_PROFILED = (
    "outcore cannot plan a graph yet: {reason}; until steps run without it they stay the slow ones "
    "of the beginning, inside the budget"
)


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
        self.standing = Standing(kind=tuple(op.target for op in captured.trace.ops))
        self.profiling: Profiling | None = None
        self.following: Following | None = None
        self.retired = False
        """Whether it runs in-core from now on, by the executable that it was given for that."""
        self.before: WeakKeyDictionary[PlannedGraph, int] = WeakKeyDictionary()
        """Graphs of which calls waited when a call of this one began; the most calls.

        Where the first to be called comes back first, each of two is in the other's.
        """
        self.lean = False
        """Whether it is profiled by the leanest program, for want of device memory."""
        self.tightened = False
        """Whether its plan was made again for want of device memory."""
        self.obstacles: Counter[Obstacle] = Counter()
        """Steps in a row that could not be metered."""
        self.corrections = 0
        """How often a kernel did otherwise than was captured."""
        self.recorded = 0
        """How often somebody had asked when it was last recorded."""

    @property
    def planned(self) -> Planned | None:
        """Its plan, once it has one."""
        return self.standing.planned

    @property
    def executable(self) -> Executable | None:
        """What its steps run from now on; None while it is profiled."""
        if self.retired:
            return self.fallback
        return None if self.following is None else self.following.executable

    def __deepcopy__(self, _: dict[int, Any]) -> PlannedGraph:
        """Itself: AOTAutograd copies modules, and the copies stand for the same graph."""
        return self

    def adopt(self, planned: Planned) -> None:
        """Take over the plan of a graph with the same trace, and what its kernels corrected."""
        self.captured = replace(self.captured, trace=planned.problem.trace)
        self.settle(planned).adopted = True
        self.standing.most_outstanding = planned.calls
        self.standing.retained = planned.retaining_bytes is not None

    # ---- the two calls --------------------------------------------------------------------------

    def forward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's forward: the results, the saved inputs, and the stand-in."""
        with self.engine.lock:
            return self._forward(args)

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """AOTAutograd's backward: the gradients."""
        with self.engine.lock:
            return self._backward(args)

    def _forward(self, args: list[Any]) -> list[Any]:
        inputs, clock = list(map(plain, args)), self.engine.driver.clock
        args.clear()
        while True:  # until it is right
            self.engine.called(self)
            with self._telling_of_memory():
                executable = self._ready(inputs)
            if self._wants_meter(executable):
                self.standing.fruitless += self.engine.metering.begin(self)
            elif self.following is not None and executable is self.following.executable:
                executable = self.following.executable_of_step(self)
            visit = Visit(ref(self), self._replay_of(executable, inputs))
            given = self.engine.held.storages(inputs) if self._is_timed(executable) else None
            start = clock.now()
            try:
                with self._telling_of_memory():
                    results, store = self._run_forward(executable, inputs, visit)
                break
            except CaptureError as error:  # which holds what the failed run made, until this ends
                inputs = self._learn(error, visit, executable)
        visit.work.append((start, clock.now()))
        visit.forward_stop = self.engine.metering.mark()
        stand_in = self.engine.stores.add(store, follow=stand_in_survives())
        if given is not None:
            visit.pause = self.engine.held.begin_pause(self, given, results)
        return [*results, stand_in]

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        saved = len(self.saved_inputs)
        stand_in, tangents = args[saved], list(map(plain, args[saved + 1 :]))
        args.clear()
        store = self.engine.stores.find(stand_in)
        store.check_versions()
        if any(map(is_batched, tangents)):
            raise StepError(
                reason="is_grads_batched=True cannot run a graph that outcore plans: call "
                "torch.autograd.grad once for each gradient, with retain_graph=True"
            )
        self.standing.fruitless = 0
        self._note_waiting()
        visit = store.visit
        again = keeps_graph()
        self.standing.retained |= again
        self._end_pause(visit, tangents)
        given = list(tangents) if visit.replay is not None else []
        clock = self.engine.driver.clock
        visit.backward_start, start = self.engine.metering.mark(), clock.now()
        inputs: list[Any] | None = None
        try:
            crossing = list(store.crossing) if again else store.crossing
            gradients = self._gradients(store.executable, crossing, tangents, store.lane)
        except CaptureError as error:
            state = self.engine.driver.generator.get_state()
            inputs = self._learn_late(error, visit, store.executable)
        except RuntimeError as error:
            if says_memory(error):
                self.engine.stores.drop(store.number)  # its memory counts
                self._plan_tighter(error)
            raise
        finally:
            if not again:
                self.engine.stores.drop(store.number)
        if inputs is not None:  # not before: the error holds what the failed run made
            gradients = self._run_again(visit, inputs, given)
            with drawing():
                self.engine.driver.generator.set_state(state)
        visit.work.append((start, clock.now()))
        visit.backward_stop = self.engine.metering.mark()
        checked = self._is_checked(store.executable)
        if visit.once:
            steps = self.engine.steps
            self.standing.came_back(steps.number, steps.calls)
        if not again:
            visit.replay = None
        self._finish(store.executable, visit)
        if checked:
            self.engine.plans.check_known(self, checked=True)
        return gradients

    def _is_checked(self, executable: Executable) -> bool:
        return self.profiling is not None and executable is self.profiling.checked

    def _is_timed(self, executable: Executable) -> bool:
        return self.profiling is not None and executable is self.profiling.timed

    def _end_pause(self, visit: Visit, tangents: list[Any]) -> None:
        """Note what went while a profiled visit waited, as its backward call begins."""
        pause, visit.pause = visit.pause, None
        if self.profiling is None or pause is None:
            return
        level_bytes = self.engine.held.level_bytes(self)
        if level_bytes is not None:
            given = self.engine.held.storages(tangents)
            self.profiling.waited(pause.gone_bytes(level_bytes, given))

    def _note_waiting(self) -> None:
        """Note whose calls wait as one of this graph begins, forward or backward."""
        for graph, calls in self.engine.roll.outstanding(self).items():
            self.before[graph] = max(calls, self.before.get(graph, 0))

    # ---- before a step --------------------------------------------------------------------------

    def _ready(self, inputs: list[Any]) -> Executable:
        """The executable for this step; plans first where enough is known."""
        self._note_waiting()
        waiting = 1 + self.engine.roll.waiting(self)
        self.standing.most_outstanding = max(self.standing.most_outstanding, waiting)
        if self.retired:
            return self.fallback
        if self.following is not None and self.following.adopted:
            self._hold_against(self.following, inputs)
        if self.following is not None:
            return self._followed(self.following, waiting, inputs)
        if self.profiling is None:
            self.profiling = self._begin(inputs)
        resident = self.engine.held.besides_bytes(self, inputs)
        fits = resident <= self.profiling.most_resident_bytes
        if waiting == 1 and not (fits or self.profiling.done):
            # An optimizer has its state by now. Where nothing fits any more, planning will say so.
            with contextlib.suppress(InfeasibleError):
                self.profiling = self._begin(inputs)
        self.profiling.resident_bytes = max(self.profiling.resident_bytes, resident)
        if not self.profiling.done or self._follows_the_unplanned():
            return self._unplanned(self.profiling, resident)
        self.standing.gone_bytes = self.profiling.gone_bytes or 0
        return self.settle(self.engine.plans.first(self, self.profiling)).executable

    def _unplanned(self, profiling: Profiling, resident_bytes: int) -> Executable:
        """What is profiled; where nobody differentiates, what moves nothing, if that has room."""
        if self.standing.fruitless < MOST_FRUITLESS:
            return profiling.executable
        if profiling.kept is None:
            program, most = self.engine.plans.kept_program(self, resident_bytes)
            generator = self.engine.driver.generator
            profiling.kept = build(self.captured.trace, program, generator), most
        executable, most = profiling.kept
        return executable if resident_bytes <= most else profiling.executable

    def _follows_the_unplanned(self) -> bool:
        """Whether a graph that waits for its backward is to be planned first, and may yet be."""
        assert self.profiling is not None  # noqa: S101 - as asked while that is so
        first = any(graph.profiling is not None for graph in self.engine.roll.outstanding(self))
        return first and self.profiling.timed_steps < PATIENCE * self.standing.most_outstanding

    def _for_calls(self, following: Following) -> Following:
        """A plan for more calls, if more waited at once than was known; it where none fits."""
        planned, calls = following.planned, self.standing.most_outstanding
        if calls > max(planned.calls, self.standing.refused_calls):
            try:
                return self.settle(self.engine.plans.for_calls(self, planned))
            except OutcoreError:  # the report tells
                self.standing.refused_calls = calls
        return following

    def _hold_against(self, following: Following, inputs: list[Any]) -> None:
        """Forget an adopted plan that was made when less was held besides the graph."""
        following.adopted = False
        if not self.engine.plans.still_fits(following.planned, self, inputs):
            self.standing.unsettle()
            self.following = None

    def _followed(self, following: Following, waiting: int, inputs: list[Any]) -> Executable:
        """The plan's executable, or its trial's; a new plan's, once the trial is done.

        `waiting`: calls of the graph whose backward is to come, this one among them.
        """
        if waiting == 1:
            if following.trial is None:
                following = self._for_calls(following)
            following = self.engine.growth.beside_what_came(self, following, inputs)
        trial = following.trial_under_way(self)
        if trial is None or (trial.done and waiting > 1):
            return following.executable
        if not trial.done:
            return trial.executable
        return self.settle(self.engine.plan_after(self, trial)).executable

    def _begin(self, inputs: list[Any]) -> Profiling:
        engine = self.engine
        program, most = engine.plans.floor_program(self, inputs, leanest=self.lean)
        return begin_profiling(
            self.captured, program, most, engine.driver, engine.readings, engine.metering.mark
        )

    def settle(self, planned: Planned) -> Following:
        """Follow a plan from the next step on, as what is returned does."""
        generator = self.engine.driver.generator
        executable = build(self.captured.trace, planned.program, generator)
        self.standing.settle(planned)
        self._unfollow()
        self.captured = replace(self.captured, joint=None)
        self.profiling, self.following = None, Following(planned, executable)
        return self.following

    def _unfollow(self) -> None:
        if self.following is not None:
            self.following.end(self)
            self.following = None

    def _wants_meter(self, executable: Executable) -> bool:
        if self.standing.fruitless >= MOST_FRUITLESS:
            return False
        planned = self.planned is not None and executable is self.executable
        return self._is_checked(executable) or (planned and self.engine.metering.wants_peak())

    def _run_forward(
        self, executable: Executable, inputs: list[Any], visit: Visit
    ) -> tuple[list[Any], Store]:
        """The results and the saved inputs. Empties `inputs`, so that each can die on the way."""
        saved = [inputs[i] for i in self.saved_inputs]
        overwritten = [inputs[i] for i in self.captured.overwritten]
        trace, arguments = self.captured.trace, [*inputs, *self.captured.constants]
        inputs.clear()
        if executable.program is not None:  # what runs as captured reads them as they are
            _let_lie(arguments, trace, trace.inputs, self.captured.turned)
        given = set(addresses(arguments)) if self.profiling is not None else None
        lane = self.engine.driver.open_lane(executable.regions)
        try:
            results, crossing = executable.forward(arguments, lane)
        except BaseException:
            lane.close()
            raise
        if self.following and (recording := self.following.recording_by(executable)):
            recording.lane = id(lane)
        versions = versions_of(crossing, overwritten)
        made = () if given is None else made_since(crossing, given)
        return [*results, *saved], Store(visit, executable, lane, crossing, versions, made)

    def _gradients(
        self, executable: Executable, crossing: list[Any], tangents: list[Any], lane: Lane
    ) -> tuple[Any, ...]:
        """What the backward call gives. Empties the lists."""
        trace = self.captured.trace
        if executable.program is not None:  # as in `_run_forward`
            _let_lie(tangents, trace, trace.tangents, range(len(tangents)))
        return executable.backward(crossing, tangents, lane)

    # ---- a graph that is not as captured --------------------------------------------------------

    def _replay_of(self, executable: Executable, inputs: list[Any]) -> Replay | None:
        if not self._is_checked(executable):
            return None
        state = self.engine.driver.generator.get_state()
        return replay_of(inputs, self.captured.overwritten, state)

    def _learn(self, error: CaptureError, visit: Visit, executable: Executable) -> list[Any]:
        """Correct the trace by what a kernel really returned, or run in-core from now on.

        Returns the inputs to begin again with.
        """
        if visit.replay is None:
            raise error
        if self._is_checked(executable):
            try:
                self.captured = self._corrected(error)
            except CaptureError as final:
                self._give_up(final)
            self.profiling = None
        with drawing():
            self.engine.driver.generator.set_state(visit.replay.generator_state)
        return list(visit.replay.inputs)

    def _learn_late(self, error: CaptureError, visit: Visit, executable: Executable) -> list[Any]:
        """The same once the forward call is over: inputs may have been overwritten since."""
        inputs = [] if visit.replay is None else visit.replay.inputs_before()
        self._learn(error, visit, executable)
        return inputs

    def _corrected(self, error: CaptureError) -> Captured:
        """The graph as it turned out to be. Raises CaptureError where that cannot be told."""
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

    def _run_again(self, visit: Visit, inputs: list[Any], tangents: list[Any]) -> tuple[Any, ...]:
        """Forward and backward once more, until it is right: the first time was not."""
        while True:
            try:
                with self._telling_of_memory():
                    executable = self._ready(inputs)
                    store = self._run_forward(executable, inputs, visit)[1]
                    try:
                        given, lane = list(tangents), store.lane
                        return self._gradients(executable, store.crossing, given, lane)
                    finally:
                        store.release()
            except CaptureError as error:
                inputs = self._learn_late(error, visit, executable)

    # ---- after a step ---------------------------------------------------------------------------

    def _finish(self, executable: Executable, visit: Visit) -> None:
        following = self.following
        if following and (recording := following.recording_by(executable)):
            following.end_recording(self, recording, visit.work[1][0])
            return
        session = self.engine.metering.session
        elsewhere = visit.thread is not threading.current_thread()
        if elsewhere and self.engine.device.type == "cpu":
            if self._is_checked(executable):
                reason = "its backward runs on another thread than its forward, unseen by the meter"
                self._give_up(CaptureError(reason=reason))
        elif session is not None and session.sees(visit):
            session.visits.append(visit)
            if self.profiling is not None and executable is self.profiling.timed:
                self.profiling.timed_steps += 1  # another's may be metered for many steps
        elif executable is self.executable and visit.once:
            self.standing.note(tuple(visit.work))
        elif following and (trial := following.trial_by(executable)):
            trial.steps += visit.once
        elif self.profiling is not None and executable is self.profiling.timed:
            self.profiling.timed_steps += 1

    def unmetered(self, obstacle: Obstacle) -> None:
        """Take that a step could not be metered. Too many in a row, and it is said what comes."""
        self.obstacles[obstacle] += 1
        if self.profiling is None or self.obstacles[obstacle] < obstacle.most:
            return
        if not obstacle.passes:
            self._give_up(CaptureError(reason=obstacle.reason))
        elif self.standing.reason != obstacle.reason:
            self.standing.reason = obstacle.reason
            warnings.warn(STILL_PROFILED.format(reason=obstacle.reason), stacklevel=2)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take what the meter saw of a step."""
        self.obstacles.clear()
        if self.profiling is not None:
            self.standing.reason = ""
            self.profiling.metered(reading, visit)

    @contextlib.contextmanager
    def _telling_of_memory(self) -> Iterator[None]:
        """Add what is known to an error of memory, and let the next step have a tighter plan."""
        try:
            yield
        except RuntimeError as error:
            if says_memory(error):
                self._plan_tighter(error)
            raise

    def _plan_tighter(self, error: RuntimeError) -> None:
        """Let the next step have a plan that leaves more free, once; say so with the error."""
        planned = self.planned
        self.engine.driver.drain()
        if self.retired:
            return
        if planned is None:
            hope = "" if self.lean else "; the next step is profiled by the plan that takes least"
            error.add_note(
                "outcore is still profiling, within a budget of "
                f"{format_bytes(self.engine.settings.budget_bytes)}: lower it if the device has "
                f"less to spare, or make the batch smaller{hope}"
            )
            self.lean, self.profiling = True, None
            return
        numbers = (
            f"outcore's plan takes {format_bytes(planned.predicted.peak(Tier.DEVICE))} at most, of "
            f"a budget of {format_bytes(planned.problem.budget_bytes)}, all that was held besides "
            "it when it was made included"
        )
        hope = "it will not be made tighter: lower the budget"
        if not self.tightened:
            self.tightened = True
            with contextlib.suppress(OutcoreError, MemoryError):
                self.settle(self.engine.plans.tighter(self, planned))
                hope = "the next step has a tighter one"
        error.add_note(f"{numbers}; {hope}")

    def retire(self, reason: str) -> None:
        """Run in-core from now on, without a word."""
        self.standing.state, self.standing.reason = State.IN_CORE, reason
        self._unfollow()
        self.retired, self.profiling = True, None
        self.captured = replace(self.captured, joint=None)

    def _give_up(self, error: CaptureError) -> None:
        """Run in-core from now on: the graph does not behave as it was captured."""
        self.retire(str(error))
        if self.engine.strict:
            raise error
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)


def _let_lie(
    given: list[Any], trace: Trace, values: Sequence[int], positions: Iterable[int]
) -> None:
    """Let what is `given` for `values` at `positions` be as it lies, and not as it is read."""
    for position in positions:
        value = trace.values[values[position]]
        given[position] = as_it_lies(given[position], conj=value.conj, neg=value.neg)
