"""Backend: the door from torch.compile to the engine."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch.fx import GraphModule

from outcore.capture import (
    BySizes,
    Captured,
    aot_autograd,
    as_kernels,
    boxed,
    by_cudnn,
    capture,
    compiles_autograd,
    default_partition,
    fused,
    is_symbolic,
    is_within,
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
from outcore.runtime.engine import Engine
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.options import Keywords, Options, checked_options, over_memory, settle
from outcore.runtime.parameters import Parameters
from outcore.runtime.reuse import Given, save_file
from outcore.runtime.runner import Runner
from outcore.runtime.summary import report_of

log = logging.getLogger("outcore")

KEY = "outcore_runner"
"""Where a shell module carries its graph, which then lives as long as what torch compiled of it."""

CONDITION = "outcore.cond_"
"""How the targets of ops begin that choose between branches (`capture.as_ops`)."""

BRANCHES = (
    "torch.cond: of a branch that was not taken in the profiled steps, tensors are counted, but "
    "not what kernels take for themselves: it may need more than predicted"
)

RESTLESS_STEPS, OF_STEPS = 20, 24
"""So many of as many steps that are captured anew are no accident."""

Call = Callable[..., Any]


class Tally:
    """A number that compiled code can raise without holding anything else."""

    number = 0


class Backend:
    """A `torch.compile` backend that keeps a training step inside a byte budget.

    >>> ooc = Backend(budget="12GiB")                            # doctest: +SKIP
    >>> model = torch.compile(model, backend=ooc)                # doctest: +SKIP

    Options are those of `Options`; a name that does not exist raises OptionError, a value that
    cannot be read raises BudgetError, OptionValueError or PolicyError, all before anything runs. A
    budget that no plan can meet raises InfeasibleError from the first forward call that knows.
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
        """Of graphs that have no plan, or of which nothing is differentiated."""
        self._captured_at: list[int] = []
        """Which of the latest steps brought a new graph."""

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Call:
        """Compile one graph for torch.compile. Errors arrive there as what they are.

        `asked`: the `mode` and `options` of torch.compile, of which there must be none. Raises
        OptionValueError where there are some.
        """
        with passing():
            _refuse_asked(asked)
        self.parameters.take((*example_inputs, *module.parameters()))
        if is_symbolic(module, example_inputs):
            instead = partial(self._uncompiled, module)
            return BySizes(module, example_inputs, self._compiled, instead)
        return self._compiled(module, example_inputs)

    def _compiled(self, module: GraphModule, inputs: Sequence[Any]) -> Call:
        compiler = aot_autograd(
            fw_compiler=self._forward_compiler,
            bw_compiler=self._backward_compiler,
            inference_compiler=partial(_plain, self.plain_calls, self.parameters),
            partition_fn=self._apart if compiles_autograd() else self._partition,
        )
        with passing(), as_kernels():
            compiled: Call = compiler(module, inputs)
        return compiled

    def __deepcopy__(self, _: dict[int, Any]) -> Backend:
        """Itself: a budget cannot be had twice. Lightning copies what torch.compile is given."""
        return self

    def report(self, *, bound: bool = False) -> Report:
        """What was planned and measured so far.

        `bound`: also the time that no plan can beat (docs/bound.md). That takes seconds for a large
        graph, the first time; where scipy is not installed, a note says so.

        Asking changes nothing. The one thing it ends is the metering of a step that is over; in the
        middle of a step that goes on, and the figures are those of before (`Engine.close_step`).
        """
        return report_of(self, bound=bound)

    def record_step(self) -> None:
        """Time the next planned step of each graph op by op, copy by copy: for `Report.to_html`.

        That one step is a little slower. A step that is metered, or whose backward never comes,
        does not count: the next one does. `report()` then has measured timelines.
        """
        self.recordings_asked = True
        if self.engine is not None:
            self.engine.recorder.ask()

    def explain(self, most: int | None = None) -> list[Explanation]:
        """Why each graph's plan moves what it moves, by the measured profile (docs/explain.md).

        In order of capture; graphs without a plan are left out. `most`: so many moves of each,
        those that free most; None is all. Each graph takes from milliseconds to seconds.
        """
        graphs = [] if self.engine is None else self.engine.registry.statuses()
        planned = (graph.planned for graph in graphs if graph.planned is not None)
        return [explain(p.lowered_for, p.plan, most=most) for p in planned]

    def save_plans(self, path: str | os.PathLike[str], most: int | None = None) -> None:
        """Write what is planned to one file, a plan for each graph (docs/plan-files.md).

        For those too that have not run for a while: torch has their code, and may run it again.
        The option `plan` takes it; `outcore plan show`, `diff` and `explain` read it. `most`: with
        reasons for so many moves of each graph, those that free most; None is all. Graphs that
        are still profiled are left out. Raises OptionValueError where nothing is planned yet,
        OSError where the file cannot be written.
        """
        engine = self.engine
        statuses = [] if engine is None else engine.registry.known()
        found = ((g.planned.lowered_for, g.planned.plan) for g in statuses if g.planned is not None)
        given = Given() if engine is None else engine.settings.given
        save_plans(save_file(found, given, most), path)

    @property
    def engaged(self) -> bool:
        """Whether a graph with a backward came here, and has run."""
        return self.engine is not None and self.engine.steps.calls > 0

    def close(self) -> None:
        """Run in-core from now on, and give back threads, host memory and disk space.

        Where calls wait for their backward, that is given back once they and this are forgotten.
        """
        self.closed = True
        if self.engine is not None:
            self.engine.close("its backend was closed")

    # ---- AOTAutograd's three calls --------------------------------------------------------------

    def _apart(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Partition as torch does: compiled autograd would replace a backward call of ours."""
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
        start = time.perf_counter()
        static = list(static_lifetime_input_indices or ())
        if self.options.fuse:
            joint, reasons = fused(joint, num_fwd_outputs)
            self._note_unfused(reasons)
        prepare(joint)
        captured = self._capture(joint, num_fwd_outputs, static)
        forward, backward = default_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static,
        )
        if captured is None:
            return forward, backward
        outside = shells(forward, backward, num_fwd_outputs, captured.overwritten)
        if any(op.target.startswith(CONDITION) for op in captured.trace.ops):
            self._note(BRANCHES)
        engine = self._engine(captured.device)
        fallback: Executable = in_core(
            boxed(forward), boxed(backward), num_fwd_outputs, len(captured.constants)
        )
        runner = Runner(PlannedGraph(engine, captured, fallback), outside.saved_inputs)
        engine.add(runner.graph)
        self._note_capture(engine.steps.number)
        outside.forward.meta[KEY] = outside.backward.meta[KEY] = runner
        self.capture_seconds += time.perf_counter() - start
        return outside.forward, outside.backward

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_unfused(self, reasons: Sequence[str]) -> None:
        if reasons:
            first = reasons[0].splitlines()[0]
            self._note(f"fuse: ops run one by one where torch's compiler fails ({first})")

    def _note_capture(self, step: int) -> None:
        """Say so, once, where step after step brings a new graph: none of them is ever planned."""
        latest = self._captured_at
        if step in latest or len(latest) == RESTLESS_STEPS:
            return
        latest[:] = [each for each in latest if each > step - OF_STEPS] + [step]
        if len(latest) == RESTLESS_STEPS:
            text = (
                "step after step is captured anew, and what does not repeat is not planned: "
                "something differs each time, such as a counter in the model or the sizes of "
                "inputs. TORCH_LOGS=recompiles says what"
            )
            self.notes.append(text)
            warnings.warn(f"outcore: {text}", stacklevel=2)

    def _capture(self, joint: GraphModule, outputs: int, static: list[int]) -> Captured | None:
        """The graph's trace, and an engine for its device; None where it cannot be planned."""
        try:
            captured = capture(without_tokens(joint), outputs, static)
            verify_trace(captured.trace)
            self._engine(captured.device)
        except CaptureError as error:
            self._refuse(error)
            return None
        return captured

    def _forward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | None = module.meta.get(KEY)
        return self._in_core(module) if runner is None else _noting(runner.forward, self.parameters)

    def _in_core(self, module: GraphModule) -> Call:
        """`module` as captured; its calls count as steps, in which planned graphs may rest."""
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
        """`module` as dynamo captured it, for sizes that have no graph."""
        self._refuse(error)

        def counted(*args: Any) -> Any:
            self._pass_by(module)
            with without_function_modes():  # dynamo's graph has their effect
                return module(*args)

        return counted

    def _backward_compiler(self, module: GraphModule, _: Any) -> Call:
        runner: Runner | None = module.meta.get(KEY)
        return boxed(module) if runner is None else _as_boxed(runner.backward)

    def _engine(self, device: torch.device) -> Engine:
        if self.closed:
            raise CaptureError(reason="its backend was closed")
        if self.engine is None:
            settings = settle(self.options, device)
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
        """A graph that cannot be planned runs in-core, and says so once."""
        if self.options.strict:
            raise error
        self._note(str(error))
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)


def _refuse_asked(asked: Mapping[str, Any]) -> None:
    """Raise OptionValueError where torch.compile was given what is Inductor's, or the Backend's."""
    reasons = {
        "mode": "modes are those of Inductor; leave it out",
        "options": "a Backend has its options: give them to outcore.Backend, or compile by name, "
        'with backend="outcore"',
    }
    for name, value in asked.items():
        raise OptionValueError(option=name, value=value, reason=reasons.get(name, "leave it out"))


def _as_boxed(method: Callable[[list[Any]], Any]) -> Call:
    def call(args: list[Any]) -> Any:
        return method(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark for stolen arguments
    return call


def _noting(method: Callable[[list[Any]], Any], parameters: Parameters) -> Call:
    """`method` as the call of a graph, whose `parameters` are noted where somebody looks."""

    def call(args: list[Any]) -> Any:
        if parameters.lookers:
            parameters.take(args)
        return method(args)

    return _as_boxed(call)


def _plain(calls: Tally, parameters: Parameters, module: GraphModule, _: Any) -> Call:
    """The module itself, run as captured: there is nothing to differentiate. Counts its `calls`."""
    by_cudnn(module)
    run = boxed(module)

    def call(args: list[Any]) -> Any:
        calls.number += 1
        return run(args)

    return _noting(call, parameters)
