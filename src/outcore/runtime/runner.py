"""Runner: the two calls that replace a graph's forward and backward in what torch compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from outcore import aten
from outcore.capture import (
    SparseGradients,
    as_it_lies,
    is_batched,
    keeps_graph,
    plain,
    stand_in_survives,
    without_autocast,
)
from outcore.errors import CaptureError, StepError
from outcore.execute import Executable, Lane, drawing
from outcore.ir.trace import Trace
from outcore.measure import says_memory
from outcore.runtime.budget.placing import call, give
from outcore.runtime.conduct.conductor import Conductor
from outcore.runtime.missing_gradients import fill
from outcore.runtime.step.replay import Replay, replay_of
from outcore.runtime.step.store import Store
from outcore.runtime.step.versions import versions_of
from outcore.runtime.step.visit import Visit, Wait

MOVED = (
    "an input begins elsewhere in its storage than before, and a view of it (as_strided with an "
    "offset) does not"
)


class Runner:
    """Runs the executable that its conductor chooses, and stores what forward leaves for backward.

    Only the code that torch compiled holds it, and only it holds the graph. Both die, with the
    graph's constants, when torch drops that code.
    """

    def __init__(
        self,
        conductor: Conductor,
        saved_inputs: tuple[int, ...],
        sparse: SparseGradients | None,
        *,
        remembers_draws: bool = False,
    ) -> None:
        """`remembers_draws`: whether stores get `draws`."""
        self.conductor, self.saved_inputs, self.sparse = conductor, saved_inputs, sparse
        self.remembers_draws = remembers_draws
        self.graph, self.engine = conductor.graph, conductor.engine

    def __deepcopy__(self, _: dict[int, Any]) -> Runner:
        """Itself: AOTAutograd copies modules, and the copies stand for the same graph."""
        return self

    def forward(self, args: list[Any]) -> list[Any]:
        """AOTAutograd's forward: the results, the saved inputs, and the stand-in."""
        with self.engine.lock:
            self.engine.driver.refuse_capture()
            return self._forward(args)

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """AOTAutograd's backward: the gradients.

        The caller may have autocast on, or another default dtype, although forward did not: ops of
        forward that run again must give what they gave at first.
        """
        with self.engine.lock, without_autocast():
            self.engine.driver.refuse_capture()
            gradients = self._backward(args)
            return gradients if self.sparse is None else self.sparse(gradients)

    def _forward(self, args: list[Any]) -> list[Any]:
        graph, residency, clock = self.graph, self.engine.residency, self.engine.driver.clock
        inputs = list(map(plain, args))
        args.clear()
        state = self.engine.driver.generator.get_state() if self.remembers_draws else None
        self.engine.metering.enter()
        self.conductor.begin_call()
        fixed = graph.captured.fixed
        moved = (inputs[i].storage_offset() != offset for i, offset in fixed)
        if not graph.retired and any(moved):
            graph.give_up(CaptureError(reason=MOVED))
        while True:  # until the trace is right
            with residency.at_once():
                executable = self.conductor.executable_for(inputs)
                executable = self.engine.eviction.before_forward(graph, executable, inputs)
            replay = self._replay_of(executable, inputs)
            visit = Visit(ref(graph), replay, self.engine.steps.returns)
            noted = graph.observed.latest_mix_uncounted or graph.times(executable)
            given = residency.given(graph, inputs) if noted else None
            start = clock.now()
            try:
                with self.conductor.telling_of_memory():
                    results, store = self._run_forward(executable, inputs, visit)
                break
            except CaptureError as error:  # holds what the failed run made until this block ends
                inputs = self._learn(error, visit, executable)
                self.engine.begun(graph)
        if visit.replay is not None and self._varies:
            visit.replay = visit.replay.giving(results[: len(graph.captured.trace.outputs)])
        with self._dropping_if_raised(store):
            self.conductor.end_call(executable)
            visit.work.append((start, clock.now()))
            visit.forward_stop = self.engine.metering.leave()
            visit.away_before = self.engine.stores.away_bytes()
            if state is not None:
                store.draws = state, self.engine.driver.generator.get_state()
            stand_in = self.engine.stores.add(store, follow=stand_in_survives())
        self.engine.growth.left(graph, executable, visit)
        if given is not None:
            visit.call_tensors = given | residency.returned(graph, results)
            if graph.times(executable):
                visit.pause = residency.begin_pause(graph, visit.call_tensors)
        return [*results, stand_in]

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        saved = len(self.saved_inputs)
        stand_in, tangents = args[saved], list(map(plain, args[saved + 1 :]))
        args.clear()
        store = self.engine.stores.find(stand_in)
        store.check_versions()
        fill(self.graph.captured.trace, tangents, self.graph.captured.device)
        if any(map(is_batched, tangents)):
            raise StepError(
                reason="is_grads_batched=True cannot run a graph that outcore plans: call "
                "torch.autograd.grad once for each gradient, with retain_graph=True"
            )
        with with_default(store.default_dtype):
            return self._come_back(store, tangents)

    def _come_back(self, store: Store, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients of the call of `store`. Empties `tangents`."""
        graph, stores, driver = self.graph, self.engine.stores, self.engine.driver
        visit, again = store.visit, keeps_graph()
        visit.away_bytes = stores.away_bytes() - visit.away_before
        with self.engine.residency.at_once():
            self.conductor.begin_backward(store, tangents, again=again)
        given = list(tangents) if visit.replay is not None else []
        state = None if visit.replay is None else driver.generator.get_state()
        since = visit.backward_stop or visit.forward_stop
        visit.waits.append(Wait(since, self.engine.metering.enter(), visit.away_bytes))
        self.engine.eviction.before_backward(graph, store)
        start = driver.clock.now()
        executable = store.executable
        inputs: list[Any] | None = None
        try:
            with call(store.lane, tangents, store.crossing, again=again):
                store.fetch()
                crossing = list(store.crossing) if again else store.crossing
                gradients = self._gradients(executable, crossing, tangents, store.lane)
            give(store.lane, gradients, last=not again)
        except CaptureError as error:
            inputs = self._learn_late(error, visit, executable)
        except RuntimeError as error:
            if says_memory(error):
                stores.drop(store.number)  # else what it holds would count
                self.conductor.plan_tighter(error)
            raise
        finally:
            if not again:
                stores.drop(store.number)
        if inputs is not None:  # not before: the error holds what the failed run made
            waits = store.number in stores
            executable, gradients = self._run_again(visit, inputs, given, state, waits=waits)
        visit.work.append((start, driver.clock.now()))
        visit.backward_stop = self.engine.metering.leave()
        if not again:
            visit.replay = None
        self.conductor.end_backward(executable, visit)
        return gradients

    @contextmanager
    def _dropping_if_raised(self, store: Store) -> Iterator[None]:
        """Drop `store` if something is raised: nothing may have its name yet."""
        with _closing_if_raised(store.lane):
            try:
                yield
            except BaseException:
                self.engine.stores.drop(store.number)
                store.release()  # it may not have been among them yet
                raise

    def _run_forward(
        self, executable: Executable, inputs: list[Any], visit: Visit
    ) -> tuple[list[Any], Store]:
        """The results and the saved inputs, and the store. Empties `inputs`, to free each early."""
        captured, execution = self.graph.captured, self.graph.execution
        saved = [inputs[i] for i in self.saved_inputs]
        overwritten = [inputs[i] for i in captured.overwritten]
        trace, arguments = captured.trace, [*inputs, *captured.constants]
        inputs.clear()
        if executable.program is not None:  # in-core execution reads them as they are
            _let_lie(arguments, trace, trace.inputs, captured.turned)
        lane = self.engine.placing.open_lane(self.engine.driver, executable, trace)
        with _closing_if_raised(lane):
            with call(lane, arguments):
                results, crossing = executable.forward(arguments, lane)
            give(lane, results)
            if execution and (recording := execution.recording_by(executable)):
                recording.lane = lane.key
            versions = versions_of(crossing, overwritten, executable.private)
            queue = self.engine.driver.queue()
            store = Store(visit, executable, lane, crossing, versions, queue)
        return [*results, *saved], store

    def _gradients(
        self, executable: Executable, crossing: list[Any], tangents: list[Any], lane: Lane
    ) -> tuple[Any, ...]:
        """The gradients. Empties both lists."""
        trace = self.graph.captured.trace
        if executable.program is not None:  # as in `_run_forward`
            _let_lie(tangents, trace, trace.tangents, range(len(tangents)))
        return executable.backward(crossing, tangents, lane)

    # ---- a graph that is not as captured --------------------------------------------------------

    def _replay_of(self, executable: Executable, inputs: list[Any]) -> Replay | None:
        if not self.graph.compares(executable):
            return None
        state = self.engine.driver.generator.get_state()
        captured = self.graph.captured
        return replay_of(captured.trace, inputs, captured.overwritten, state)

    def _learn(self, error: CaptureError, visit: Visit, executable: Executable) -> list[Any]:
        """Have the graph corrected; returns the inputs to begin again with."""
        replay = self._replay(error, visit, executable)
        return self._rewound(replay, replay.inputs)

    def _learn_late(self, error: CaptureError, visit: Visit, executable: Executable) -> list[Any]:
        """As `_learn`, after the forward call.

        Raises StepError if inputs were overwritten since.
        """
        replay = self._replay(error, visit, executable)
        return self._rewound(replay, replay.inputs_before())

    def _replay(self, error: CaptureError, visit: Visit, executable: Executable) -> Replay:
        """Have the graph corrected; returns what is needed to begin again."""
        if visit.replay is None:
            raise error
        if self.graph.compares(executable):
            self.graph.correct(error)
        return visit.replay

    @property
    def _varies(self) -> bool:
        trace = self.graph.captured.trace
        return any(aten.varies(op.target) for op in trace.ops[: trace.boundary])

    def _rewound(self, replay: Replay, inputs: Iterable[Any]) -> list[Any]:
        """The `inputs`; random ops draw again what they drew."""
        with drawing():
            self.engine.driver.generator.set_state(replay.generator_state)
        return list(inputs)

    def _run_again(
        self, visit: Visit, inputs: list[Any], tangents: list[Any], state: Any, *, waits: bool
    ) -> tuple[Executable, tuple[Any, ...]]:
        """Run forward and backward again until the trace is right.

        Returns what ran, and the gradients. `state`: the generator's as backward began. Others may
        have drawn since forward. `waits`: the call is outstanding still, for another backward.
        """
        replay = visit.replay
        assert replay is not None  # noqa: S101 - the call had to be one that can run again
        while True:
            try:
                with self.conductor.telling_of_memory():
                    executable = self.conductor.ready(inputs, again=waits)
                    results, store = self._run_forward(executable, inputs, visit)
                    with drawing():
                        self.engine.driver.generator.set_state(state)
                    try:
                        replay.check(results)
                        del results
                        given, lane = list(tangents), store.lane
                        with call(lane, given, store.crossing):
                            found = self._gradients(executable, store.crossing, given, lane)
                        give(lane, found)
                        return executable, found
                    finally:
                        store.release()
            except CaptureError as error:
                inputs = self._learn_late(error, visit, executable)


@contextmanager
def with_default(dtype: torch.dtype) -> Iterator[None]:
    """Context with `dtype` as the default dtype."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _let_lie(
    given: list[Any], trace: Trace, values: Sequence[int], positions: Iterable[int]
) -> None:
    """Replace what is `given` at `positions` by what lies in memory, without conj or neg bits."""
    for position in positions:
        value = trace.values[values[position]]
        given[position] = as_it_lies(given[position], conj=value.conj, neg=value.neg)


@contextmanager
def _closing_if_raised(lane: Lane) -> Iterator[None]:
    """Close `lane` if something is raised: nothing else may know it yet."""
    try:
        yield
    except BaseException:
        lane.close()
        raise
