"""Backend: a budget, and the entry point from torch.compile to the engine that keeps it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Unpack

from torch.fx import GraphModule

from outcore.capture import BySizes, ending_graphs, is_symbolic, passing, trace_type_checks
from outcore.errors import CaptureError, OptionValueError
from outcore.explain import Explanation, explain
from outcore.planfile import save_plans
from outcore.report import Report
from outcore.runtime.graph_compiler import Call, GraphCompiler
from outcore.runtime.settings.options import Keywords, checked_options
from outcore.runtime.settings.reuse import Given, save_file
from outcore.runtime.state import CLOSED, BackendState
from outcore.runtime.summary import report_of


class Backend(BackendState):
    """A `torch.compile` backend that keeps a training step inside a byte budget.

    >>> ooc = Backend(budget="12GiB")                            # doctest: +SKIP
    >>> model = torch.compile(model, backend=ooc)                # doctest: +SKIP

    The options are those of `outcore.runtime.settings.options.Options`. An unknown name raises
    OptionError, and a value that cannot be read raises BudgetError, OptionValueError or
    PolicyError, all before anything runs. If no plan meets the budget, the first forward call that
    finds this out raises InfeasibleError.
    """

    def __init__(self, budget: str | float | None = None, **options: Unpack[Keywords]) -> None:
        super().__init__(checked_options({"budget": budget, **options}))
        trace_type_checks()

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Call:
        """Compile one graph for torch.compile. Errors reach the caller with their own types.

        `asked`: the `mode` and `options` given to torch.compile. Raises OptionValueError if there
        are any: options belong to the Backend itself.
        """
        with passing():
            _refuse_asked(asked)
        call: Call
        compiler = GraphCompiler(self)
        if is_symbolic(module, example_inputs):
            instead = partial(compiler.uncompiled, module)
            call = BySizes(module, example_inputs, compiler.compiled, compiler.symbolic, instead)
        else:
            with passing(), ending_graphs(self._untraced):
                call = compiler.compiled(module, example_inputs)
        # Only now: if tracing fails, torch may run the code as plain PyTorch.
        self.parameters.take((*example_inputs, *module.parameters()))
        return call

    def _untraced(self, error: CaptureError) -> None:
        """Note a graph that torch captures anew, in parts; raise with `strict`."""
        if self.options.strict:
            raise error
        self.note(f"{error}: what causes this runs as plain PyTorch, between graphs")

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
        save_plans(save_file(found, given, most), os.path.expanduser(path))  # noqa: PTH111 - no RuntimeError if there is no such user

    def close(self) -> None:
        """Run in-core from now on, and release threads, host memory and disk space.

        If calls are outstanding, these are released once the calls are over, or freed.
        """
        self.closed = True
        if self.engine is not None:
            self.engine.close(CLOSED)


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
