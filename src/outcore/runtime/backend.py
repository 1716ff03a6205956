"""Backend: the entry point from torch.compile to the engine.

torch.compile calls the backend with a captured module. AOTAutograd then calls `_partition` with the
joint forward and backward graph, and the two compilers with the two halves. A graph that can be
planned becomes a PlannedGraph, and its halves call the graph's Runner.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Unpack

import torch
from torch.fx import GraphModule

from outcore.capture import (
    BySizes,
    LargeInputs,
    SparseGradients,
    Symbolic,
    aot_autograd,
    as_dynamo_compiles,
    as_kernels,
    boxed,
    by_cudnn,
    capture,
    compiles_autograd,
    default_partition,
    densely,
    ending_graphs,
    fused,
    is_symbolic,
    is_within,
    partition_later,
    passing,
    prepare,
    shells,
    without_function_modes,
    without_tokens,
)
from outcore.errors import CaptureError, OptionValueError
from outcore.execute import Executable, in_core
from outcore.explain import Explanation, explain
from outcore.ir.verify import verify_trace
from outcore.planfile import save_plans
from outcore.report import Report
from outcore.runtime.budget.engine import Engine
from outcore.runtime.by_size import BySize
from outcore.runtime.conduct.conductor import Conductor
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.parameters import Parameters
from outcore.runtime.runner import Runner
from outcore.runtime.settings.options import (
    Keywords,
    Options,
    checked_options,
    over_memory,
    settings_for,
)
from outcore.runtime.settings.reuse import Given, save_file
from outcore.runtime.summary import report_of

KEY = "outcore_runner"
"""Key of the Runner in the `meta` of a shell module. The Runner holds the graph, so the graph lives
as long as the code that torch compiled for it."""

CONDITION = "outcore.cond_"
"""Prefix of the targets of ops that choose between branches (`capture.as_ops`)."""

BRANCHES = (
    "torch.cond: for a branch that was not taken in the profiled steps, plans count tensors but "
    "not kernel workspaces: it may need more memory than predicted"
)

RESTLESS_STEPS, OF_STEPS = 20, 24
"""The backend warns if `RESTLESS_STEPS` of the latest `OF_STEPS` steps were captured anew."""

Call = Callable[..., Any]


class Tally:
    """A counter that compiled code can increment without keeping the Backend alive.

    It needs no lock: between reading and writing an attribute, CPython switches no threads. And
    only whether it has grown matters.
    """

    number = 0


class Backend:
    """A `torch.compile` backend that keeps a training step inside a byte budget.

    >>> ooc = Backend(budget="12GiB")                            # doctest: +SKIP
    >>> model = torch.compile(model, backend=ooc)                # doctest: +SKIP

    The options are those of `outcore.runtime.settings.options.Options`. An unknown name raises
    OptionError, and a value that cannot be read raises BudgetError, OptionValueError or
    PolicyError, all before anything runs. If no plan meets the budget, the first forward call that
    finds this out raises InfeasibleError.
    """

    def __init__(self, budget: str | float | None = None, **options: Unpack[Keywords]) -> None:
        self.options: Options = checked_options({"budget": budget, **options})
        self.engine: Engine | None = None
        self.capture_seconds = 0.0
        self.notes: list[str] = []
        self.closed = False
        self.recordings_asked = False
        self.parameters = Parameters()
        self.plain_calls = Tally()
        """Calls of graphs that cannot be planned, or that have nothing to differentiate."""
        self._compiled_anew = False
        """Whether torch compiled something since a graph was last added."""
        self._large_inputs = LargeInputs()
        self._captured_at: list[int] = []
        """Numbers of the latest steps in which a new graph was captured."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Call:
        """Compile one graph for torch.compile. Errors reach the caller with their own types.

        `asked`: the `mode` and `options` given to torch.compile. Raises OptionValueError if there
        are any: options belong to the Backend itself.
        """
        with passing():
            _refuse_asked(asked)
        call: Call
        if is_symbolic(module, example_inputs):
            instead = partial(self._uncompiled, module)
            call = BySizes(module, example_inputs, self._compiled, self._symbolic, instead)
        else:
            with passing(), ending_graphs(self._untraced):
                call = self._compiled(module, example_inputs)
        # Only now: if tracing fails, torch may run the code as plain PyTorch.
        self.parameters.take((*example_inputs, *module.parameters()))
        return call

    def _untraced(self, error: CaptureError) -> None:
        """Note a graph that torch captures anew, in parts; raise with `strict`."""
        if self.options.strict:
            raise error
        self._note(f"{error}: what causes this runs as plain PyTorch, between graphs")

    def _symbolic(self, module: GraphModule, inputs: Sequence[Any]) -> Call:
        """Compile a graph once for all sizes. Raises CaptureError if that is not possible."""
        return self._compiled(module, inputs, partition=self._partition_symbolic)

    def _compiled(
        self, module: GraphModule, inputs: Sequence[Any], partition: Call | None = None
    ) -> Call:
        compiler = aot_autograd(
            fw_compiler=self._forward_compiler,
            bw_compiler=self._backward_compiler,
            inference_compiler=partial(_plain, self.plain_calls, self.parameters),
            partition_fn=self._apart if compiles_autograd() else partition or self._partition,
        )
        self._compiled_anew = True
        with passing(), as_kernels():
            compiled: Call = compiler(module, inputs)
        return compiled

    def __copy__(self) -> Backend:
        """Itself, as for `__deepcopy__`."""
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Backend:
        """Itself: a budget exists only once. Lightning copies what torch.compile is given."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """As a new one with the same options: a pickle of a compiled model trains as that did."""
        every = ((field.name, getattr(self.options, field.name)) for field in fields(self.options))
        return _made, ({name: value for name, value in every if value is not None},)

    def report(self, *, bound: bool = False) -> Report:
        """What was planned and measured so far.

        `bound`: also the time that no plan can beat (docs/bound.md). For a large graph this needs
        seconds, the first time. If scipy is not installed, a note says so.

        Calling this does not affect training. It only ends the metering of a step that is over. In
        the middle of a step, metering continues, and the figures are from before that step
        (`Engine.close_step`).
        """
        return report_of(self, bound=bound)

    def record_step(self) -> None:
        """Time each op and copy of the next planned step of each graph, for `Report.to_html`.

        That step is a little slower. A metered step, or one whose backward never comes, does not
        count; the next one is recorded instead. `report()` then has measured timelines.
        """
        self.recordings_asked = True
        if self.engine is not None:
            self.engine.recorder.ask()

    def explain(self, most: int | None = None) -> list[Explanation]:
        """Why each graph's plan moves what it moves, by the measured profile (docs/explain.md).

        One Explanation per planned graph, in order of capture; graphs without a plan are left out.
        `most`: how many moves to explain per graph, those that free most memory first; None: all.
        Each graph needs from milliseconds to seconds.
        """
        graphs = [] if self.engine is None else self.engine.registry.statuses()
        planned = (graph.planned for graph in graphs if graph.planned is not None)
        return [explain(p.lowered_for, p.plan, most=most) for p in planned]

    def save_plans(self, path: str | os.PathLike[str], most: int | None = None) -> None:
        """Write the plans of all graphs to one file (docs/plan-files.md).

        Graphs that have not run for a while are included: torch still has their code and may run
        it again. Graphs that are still profiled are left out. The option `plan` reads the file, and
        so do `outcore plan show`, `diff` and `explain`. `most`: the file gives reasons for so many
        moves per graph, those that free most memory; None: for all. Raises OptionValueError if
        nothing is planned yet, OSError if the file cannot be written.
        """
        engine = self.engine
        statuses = [] if engine is None else engine.registry.known()
        found = ((g.planned.lowered_for, g.planned.plan) for g in statuses if g.planned is not None)
        given = Given() if engine is None else engine.settings.given
        save_plans(save_file(found, given, most), path)

    @property
    def engaged(self) -> bool:
        """Whether a graph with a backward was captured here, and has run."""
        return self.engine is not None and self.engine.steps.calls > 0

    def close(self) -> None:
        """Run in-core from now on, and release threads, host memory and disk space.

        If calls are outstanding, these are released once the calls and this Backend are freed.
        """
        self.closed = True
        if self.engine is not None:
            self.engine.close("its backend was closed")

    # ---- AOTAutograd's three calls --------------------------------------------------------------

    def _apart(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Partition as torch does: compiled autograd would replace outcore's backward call."""
        self._refuse(CaptureError(reason="compiled autograd is enabled"))
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
        static = list(static_lifetime_input_indices or ())
        try:
            with self._capturing():
                joint = self._fused(joint, num_fwd_outputs)
                conductor, sparse = self._conductor(joint, num_fwd_outputs, static)
        except CaptureError as error:
            self._refuse(error)
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)
        halves = default_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static,
        )
        outside = shells(*halves, num_fwd_outputs, conductor.graph.captured.overwritten)
        runner = Runner(conductor, outside.saved_inputs, sparse)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = runner
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
        symbolic = Symbolic(joint, outputs, static_lifetime_input_indices or ())
        forward, backward = default_partition(joint, joint_inputs, num_fwd_outputs=outputs)
        outside = shells(forward, backward, outputs, symbolic.overwritten)
        saved = tuple(map(symbolic.given.index, outside.saved_inputs))

        def make(args: Sequence[Any]) -> Runner:
            with self._capturing():
                made = self._fused(symbolic.at(args), outputs)
                conductor, sparse = self._conductor(made, outputs, symbolic.static_inputs)
            return Runner(conductor, saved, sparse)

        by_size = BySize(symbolic, len(saved), make)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = by_size
        return outside.forward, outside.backward

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """In this context, time counts as `capture_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.capture_seconds += time.perf_counter() - start

    def _fused(self, joint: GraphModule, outputs: int) -> GraphModule:
        """`joint` with fused kernels, if the user requested them."""
        if not self.options.fuse:
            return joint
        joint, reasons = fused(joint, outputs)
        self._note_unfused(reasons)
        return joint

    def _conductor(
        self, joint: GraphModule, outputs: int, static: list[int]
    ) -> tuple[Conductor, SparseGradients | None]:
        """The conductor of the graph of `joint`, which is registered with its device's engine.

        Also returns what makes the sparse gradients, if there are any.

        Raises CaptureError if it cannot be planned.
        """
        prepare(joint, outputs, self._large_inputs)
        dense, sparse = densely(joint, outputs)
        captured = capture(without_tokens(dense), outputs, static)
        verify_trace(captured.trace)
        engine = self._engine(captured.device)
        if any(op.target.startswith(CONDITION) for op in captured.trace.ops):
            self._note(BRANCHES)
        constants = len(captured.constants)

        def fallback() -> Executable:
            with as_dynamo_compiles():
                forward, backward = partition_later(dense, outputs, static)
            return in_core(boxed(forward), boxed(backward), outputs, constants)

        graph = PlannedGraph(captured, fallback, engine.equipment, engine.registry.tell)
        engine.add(graph, compiled=self._compiled_anew or self.options.fuse)
        self._compiled_anew = False
        self._note_capture(engine.steps.number)
        return Conductor(engine, graph), sparse

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_unfused(self, reasons: Sequence[str]) -> None:
        if reasons:
            first = reasons[0].splitlines()[0]
            self._note(f"fuse: torch's compiler failed, so some ops run one by one ({first})")

    def _note_capture(self, step: int) -> None:
        """Warn once if almost every step brings a new graph, which takes longer than the step."""
        latest = self._captured_at
        if step in latest or len(latest) == RESTLESS_STEPS:
            return
        latest[:] = [each for each in latest if each > step - OF_STEPS] + [step]
        if len(latest) == RESTLESS_STEPS:
            text = (
                "step after step needs a new graph, which takes time: something differs each time, "
                "such as the sizes of inputs (pad them to few), a counter in the model or a list "
                "that grows (TORCH_LOGS=recompiles,dynamic may show it)"
            )
            self.notes.append(text)
            warnings.warn(f"outcore: {text}", stacklevel=2)

    def _forward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | BySize | None = module.meta.get(KEY)
        return self._in_core(module) if runner is None else _noting(runner.forward, self.parameters)

    def _in_core(self, module: GraphModule) -> Call:
        """`module` as captured. Its calls are counted as steps: planned graphs may be inactive."""
        call: Call = boxed(module)

        def counted(args: list[Any]) -> Any:
            self._pass_by(module)
            return call(args)

        return _noting(counted, self.parameters)

    def _pass_by(self, module: GraphModule) -> None:
        self.plain_calls.number += 1
        if self.engine is not None:
            self.engine.passed_by(id(module))

    def _uncompiled(self, module: GraphModule, error: CaptureError) -> Call:
        """`module` as Dynamo captured it, for sizes that have no graph."""
        self._refuse(error)

        def counted(*args: Any) -> Any:
            self._pass_by(module)
            with without_function_modes():  # their effect is already in Dynamo's graph
                return module(*args)

        return counted

    def _backward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | BySize | None = module.meta.get(KEY)
        return boxed(module) if runner is None else _as_boxed(runner.backward)

    def _engine(self, device: torch.device) -> Engine:
        if self.closed:
            raise CaptureError(reason="its backend was closed")
        if self.engine is None:
            settings = settings_for(self.options, device)
            over = over_memory(settings, device)
            if over:
                self._note(over)
                warnings.warn(f"outcore: {over}", stacklevel=2)
            self.engine = Engine(settings, device)
            self.engine.recorder.asked += self.recordings_asked
        elif self.engine.device != device:
            reason = f"one budget covers one device: {self.engine.device}, not also {device}"
            raise CaptureError(reason=reason)
        return self.engine

    def _refuse(self, error: CaptureError) -> None:
        """Warn and note that a graph cannot be planned and runs in-core; raise with `strict`."""
        if self.options.strict:
            raise error
        self._note(str(error))
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)


def _refuse_asked(asked: Mapping[str, Any]) -> None:
    """Raise OptionValueError if torch.compile was given a `mode`, `options` or anything else."""
    reasons = {
        "mode": "only Inductor has modes; leave it out",
        "options": "a Backend already has its options: pass them to outcore.Backend, or compile "
        'by name, with backend="outcore"',
    }
    for name, value in asked.items():
        raise OptionValueError(option=name, value=value, reason=reasons.get(name, "leave it out"))


def _made(options: Mapping[str, Any]) -> Backend:
    """A Backend with these options."""
    return Backend(**options)


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
