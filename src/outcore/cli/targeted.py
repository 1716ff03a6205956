"""targeted: turn a function of the user's script into a traced step and a problem."""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.status import Status

from outcore.cli.predicted import machine_of

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.errors import InfeasibleError
    from outcore.ir.problem import Problem
    from outcore.preflight.step import Traced
    from outcore.presets import Preset


@dataclass(slots=True)
class Targeted:
    """A function that makes a step, and a machine; the function is not called yet."""

    target: str
    machine: Preset
    budget_bytes: int
    states: int
    real: bool
    notes: list[str] = field(default_factory=list)
    """How training would differ from the trace; empty before `comparison` has traced it."""

    @property
    def title(self) -> str:
        """The target, as the user wrote it."""
        return self.target

    def comparison(self, status: Status) -> Comparison:
        """Trace the step under fake tensors, and estimate its times. Raises TargetError.

        The script's output goes to standard error.
        """
        from outcore.compare import Comparison  # noqa: PLC0415 - loads numpy

        status.update(escape(f"{self.title}: tracing"))
        with redirect_stdout(sys.stderr):
            step = traced_step(self.target, real=self.real)
        self.notes = [step.note] if step.note else []
        return Comparison(step.trace, self.machine, 1, self.states)

    def problem(self, comparison: Comparison) -> Problem:
        """The problem to plan, with the margin that training leaves free."""
        from outcore.runtime.limits.margin import margin_bytes  # noqa: PLC0415 - with the others

        problem = comparison.problem(self.budget_bytes)
        margin = margin_bytes(self.budget_bytes)
        return replace(problem, outside_bytes=problem.outside_bytes + margin)

    def tell(self, error: InfeasibleError) -> None:
        """Make `error` name a budget that works in training, with the margin of that budget."""
        from outcore.runtime.limits.margin import for_any_budget  # noqa: PLC0415 - with the others

        for_any_budget(error, self.budget_bytes)


def targeted(target: str, hardware: str, budget: str, states: int, *, real: bool) -> Targeted:
    """Look up the machine and the budget. Raises OptionValueError or BudgetError."""
    from outcore.compare import read_budget  # noqa: PLC0415 - loads numpy
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others

    machine = machine_of(hardware)
    nbytes = read_budget("--budget", budget, machine.hardware.capacity(Tier.DEVICE))
    return Targeted(target, machine, nbytes, states, real)


def traced_step(target: str, *, real: bool) -> Traced:
    """Call the target's function and trace the step that it returns. Raises TargetError."""
    from outcore.errors import TargetError  # noqa: PLC0415 - with the others
    from outcore.preflight.advice import ON_CPU, advice_for  # noqa: PLC0415 - loads torch
    from outcore.preflight.lines import line_of  # noqa: PLC0415 - with the others
    from outcore.preflight.step import (  # noqa: PLC0415 - loads torch
        NEEDS_NUMBERS,
        FewNumbers,
        no_memory,
        traced,
        unlogged,
        why,
    )
    from outcore.preflight.target import find, make_step, own_arguments  # noqa: PLC0415 - loads torch

    mode = no_memory()
    with own_arguments(target):
        function = find(target)
    try:
        with ExitStack() as stack:
            stack.enter_context(own_arguments(target))
            stack.enter_context(unlogged())
            if not real:
                stack.enter_context(mode)
                stack.enter_context(FewNumbers(mode))
            returned = function()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            reason = f"the function ends the process (exit code {error.code})"
        elif isinstance(error, NEEDS_NUMBERS):
            reason = f"the function cannot be called: {why(error)}"
        else:
            reason = f"the function raises {why(error)}"
        advice = "" if real else "--real makes the model and its inputs with real tensors"
        advice = ON_CPU if advice_for(error) == ON_CPU else advice
        where = line_of(error)
        raise TargetError(target=target, reason=reason, where=where, advice=advice) from error
    step = make_step(target, returned)
    try:
        return traced(step, mode)
    except Exception as error:
        where, reason = line_of(error), f"the step cannot be traced: {why(error)}"
        raise TargetError(
            target=target, reason=reason, where=where, advice=advice_for(error)
        ) from error
