"""graph_compiler: turn a graph that torch.compile captured into calls that run it.

AOTAutograd calls `_partition` with the joint forward and backward graph, then the two compilers
with the two halves. A graph that can be planned becomes a PlannedGraph, and its halves call the
graph's Runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch.fx import GraphModule

from outcore.capture import (
    AtSizes,
    Missing,
    Shells,
    Source,
    Symbolic,
    aot_autograd,
    as_dynamo_compiles,
    as_kernels,
    boxed,
    by_cudnn,
    compiles_autograd,
    default_partition,
    fused,
    is_within,
    partition_later,
    passing,
    rewritten,
    shells,
    source_of,
    without_function_modes,
)
from outcore.errors import CaptureError
from outcore.execute import Executable, in_core
from outcore.runtime.by_size import BySize
from outcore.runtime.conduct.conductor import Conductor
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.missing_gradients import telling_missing
from outcore.runtime.parameters import Parameters
from outcore.runtime.results.by_gradients import ByGradients
from outcore.runtime.results.variant import ALONE, Variant
from outcore.runtime.runner import Runner
from outcore.runtime.state import CLOSED, BackendState, Tally

KEY = "outcore_runner"
"""Key of the Runner in the `meta` of a shell module. The Runner holds the graph, so the graph lives
as long as the code that torch compiled for it."""

CONDITION = "outcore.cond_"
"""Prefix of the targets of ops that choose between branches (`capture.as_ops`)."""

BRANCHES = (
    "torch.cond: for a branch that was not taken in the profiled steps, plans count tensors but "
    "not kernel workspaces: it may need more memory than predicted"
)

Call = Callable[..., Any]


class GraphCompiler:
    """Compiles graphs for a Backend, whose engine then runs them."""

    def __init__(self, state: BackendState) -> None:
        self.state = state
        self._told: ByGradients | None = None
        """What runs the calls of the graph that is being compiled, if it has several results."""

    def symbolic(self, module: GraphModule, inputs: Sequence[Any]) -> Call:
        """Compile a graph once for all sizes. Raises CaptureError if that is not possible."""
        return self.compiled(module, inputs, partition=self._partition_symbolic)

    def compiled(
        self, module: GraphModule, inputs: Sequence[Any], partition: Call | None = None
    ) -> Call:
        """Compile a graph: planned if it can be, else as torch captured it."""
        state = self.state
        compiler = aot_autograd(
            fw_compiler=self._forward_compiler,
            bw_compiler=self._backward_compiler,
            inference_compiler=partial(_plain, state.plain_calls, state.parameters),
            partition_fn=self._apart if compiles_autograd() else partition or self._partition,
        )
        state.compiled_anew = True
        self._take_told()  # that of a compilation that failed
        with passing(), as_kernels():
            compiled: Call = compiler(module, inputs)
        told = self._take_told()
        return compiled if told is None else telling_missing(compiled, told)

    def _take_told(self) -> ByGradients | None:
        told, self._told = self._told, None
        return told

    def _apart(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Partition as torch does: compiled autograd would replace outcore's backward call."""
        self.state.refuse(CaptureError(reason="compiled autograd is enabled"))
        return default_partition(*args, **kwargs)

    def _partition(
        self,
        joint: GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[GraphModule, GraphModule]:
        if is_within(joint_inputs):
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)
        outputs, static = num_fwd_outputs, list(static_lifetime_input_indices or ())
        missing = Missing(joint, outputs)
        if len(missing.tangents) > 1:
            with suppress(CaptureError):  # then it is refused below
                return self._several(missing, joint_inputs, static)
        try:
            source, conductor = self._captured(joint, outputs, static, ALONE)
        except CaptureError as error:
            self.state.refuse(error)
            return default_partition(joint, joint_inputs, num_fwd_outputs=outputs)
        halves = default_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=outputs,
            static_lifetime_input_indices=static,
        )
        outside = shells(*halves, outputs, conductor.graph.captured.overwritten)
        runner = Runner(conductor, outside.saved_inputs, source.sparse)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = runner
        return outside.forward, outside.backward

    def _several(
        self, missing: Missing, joint_inputs: Any, static: list[int]
    ) -> tuple[GraphModule, GraphModule]:
        """The shells of a graph with several results that may get gradients.

        Raises CaptureError if it cannot be planned.
        """
        outputs = missing.forward_outputs
        halves = default_partition(missing.joint, joint_inputs, num_fwd_outputs=outputs)
        outside = shells(*halves, outputs, missing.overwritten)

        def make(joint: GraphModule, variant: Variant) -> Runner:
            source, conductor = self._captured(joint, outputs, static, variant)
            saved, again = outside.saved_inputs, variant.may_run_again
            return Runner(conductor, saved, source.sparse, remembers_draws=again)

        return self._by_gradients(missing, static, outside, make)

    def _captured(
        self, joint: GraphModule, outputs: int, static: list[int], variant: Variant
    ) -> tuple[Source, Conductor]:
        """What is captured of `joint`, which is rewritten. Raises CaptureError if it cannot be."""
        with self._capturing():
            joint = self._fused(joint, outputs)
            source = source_of(rewritten(joint, outputs, self.state.large_inputs), outputs, static)
            return source, self._conductor(source, outputs, static, variant)

    def _by_gradients(
        self, missing: Missing, static: list[int], outside: Shells, make: Callable[..., Any]
    ) -> tuple[GraphModule, GraphModule]:
        """The shells of a graph whose calls depend on which results get gradients."""
        engine, refuse = self.state.engine_for(missing.device), self.state.refuse
        self._told = ByGradients(engine, missing, static, outside.saved_inputs, make, refuse)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = self._told
        return outside.forward, outside.backward

    def _partition_symbolic(
        self,
        joint: GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[GraphModule, GraphModule]:
        """Partition a joint graph with symbolic sizes: graphs with numbers are made from it later.

        Raises CaptureError if that cannot be done.
        """
        outputs = num_fwd_outputs
        if is_within(joint_inputs):
            return default_partition(joint, joint_inputs, num_fwd_outputs=outputs)
        missing, static = Missing(joint, outputs), list(static_lifetime_input_indices or ())
        forward, backward = default_partition(joint, joint_inputs, num_fwd_outputs=outputs)
        outside = shells(forward, backward, outputs, missing.overwritten)

        def make(joint: GraphModule, variant: Variant) -> BySize:
            symbolic = Symbolic(joint, outputs, static)
            return self._by_size(symbolic, outside.saved_inputs, variant)

        if len(missing.tangents) > 1:
            return self._by_gradients(missing, static, outside, make)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = make(joint, ALONE)
        return outside.forward, outside.backward

    def _by_size(self, symbolic: Symbolic, saved_inputs: Sequence[int], variant: Variant) -> BySize:
        """The calls of a graph with symbolic sizes."""
        outputs, static = symbolic.forward_outputs, symbolic.static_inputs
        saved = tuple(map(symbolic.given.index, saved_inputs))
        at_sizes = AtSizes(
            symbolic,
            lambda graph: rewritten(self._fused(graph, outputs), outputs, self.state.large_inputs),
        )

        def make(args: Sequence[Any]) -> Runner:
            with self._capturing():
                source = at_sizes.at(args)
                conductor = self._conductor(source, outputs, static, variant)
            again = variant.may_run_again
            return Runner(conductor, saved, source.sparse, remembers_draws=again)

        return BySize(symbolic, len(saved), make)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """In this context, time counts as `capture_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.state.capture_seconds += time.perf_counter() - start

    def _fused(self, joint: GraphModule, outputs: int) -> GraphModule:
        """`joint` with fused kernels, if the user requested them."""
        if not self.state.options.fuse:
            return joint
        joint, reasons = fused(joint, outputs)
        if reasons:
            first = reasons[0].splitlines()[0]
            self.state.note(f"fuse: some ops run one by one, as fusing them failed ({first})")
        return joint

    def _conductor(
        self, source: Source, outputs: int, static: list[int], variant: Variant
    ) -> Conductor:
        """The conductor of a graph, which is registered with its device's engine."""
        state, captured = self.state, source.captured
        engine = variant.engine
        if engine is None or engine.device != captured.device:
            engine = state.engine_for(captured.device)
        if any(op.target.startswith(CONDITION) for op in captured.trace.ops):
            state.note(BRANCHES)
        constants, dense = len(captured.constants), source.dense

        def fallback() -> Executable:
            with as_dynamo_compiles():
                forward, backward = partition_later(dense(), outputs, static)
            return in_core(boxed(forward), boxed(backward), outputs, constants)

        graph = PlannedGraph(captured, fallback, engine.equipment, engine.registry.tell)
        graph.provisional = variant.provisional
        engine.add(graph, compiled=state.compiled_anew or state.options.fuse)
        state.compiled_anew = False
        if state.closed:
            graph.retire(CLOSED)
        if not source.told:
            state.note_capture(engine.steps.number)
        return Conductor(engine, graph)

    def _forward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | BySize | ByGradients | None = module.meta.get(KEY)
        if runner is None:
            return self._in_core(module)
        return _noting(runner.forward, self.state.parameters)

    def _in_core(self, module: GraphModule) -> Call:
        """`module` as captured. Its calls are counted as steps: planned graphs may be inactive."""
        call: Call = boxed(module)

        def counted(args: list[Any]) -> Any:
            self._pass_by(module)
            return call(args)

        return _noting(counted, self.state.parameters)

    def _pass_by(self, module: GraphModule) -> None:
        self.state.plain_calls.number += 1
        if self.state.engine is not None:
            self.state.engine.passed_by(id(module))

    def uncompiled(self, module: GraphModule, error: CaptureError) -> Call:
        """`module` as Dynamo captured it, for sizes that have no graph."""
        self.state.refuse(error)

        def counted(*args: Any) -> Any:
            self._pass_by(module)
            with without_function_modes():  # their effect is already in Dynamo's graph
                return module(*args)

        return counted

    def _backward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | BySize | ByGradients | None = module.meta.get(KEY)
        return boxed(module) if runner is None else _as_boxed(runner.backward)


def _as_boxed(method: Callable[[list[Any]], Any]) -> Call:
    def call(args: list[Any]) -> Any:
        return method(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # tells AOTAutograd that it empties args
    return call


def _noting(method: Callable[[list[Any]], Any], parameters: Parameters) -> Call:
    """`method` as a boxed call that notes the parameters it is given, if anybody watches them."""

    def call(args: list[Any]) -> Any:
        if parameters.lookers:
            parameters.take(args)
        return method(args)

    return _as_boxed(call)


def _plain(calls: Tally, parameters: Parameters, module: GraphModule, _: Any) -> Call:
    """`module` as captured, as there is nothing to differentiate. Counts its calls in `calls`."""
    by_cudnn(module)
    run = boxed(module)

    def call(args: list[Any]) -> Any:
        calls.number += 1
        return run(args)

    return _noting(call, parameters)
