"""A step of somebody's script, modelled: what `outcore estimate` takes, for other commands."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.status import Status

from outcore.cli.estimate import traced_step
from outcore.cli.predicted import machine_of

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.errors import InfeasibleError
    from outcore.ir.problem import Problem
    from outcore.presets import Preset


@dataclass(slots=True)
class Targeted:
    """A function that makes a step, on a machine; not called yet."""

    target: str
    machine: Preset
    budget_bytes: int
    states: int
    real: bool
    notes: list[str] = field(default_factory=list)
    """How training would differ from the trace, once there is one."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return self.target

    def comparison(self, status: Status) -> Comparison:
        """Trace it under fake tensors, and estimate its times. Raises TargetError.

        What the script prints goes to standard error.
        """
        from outcore.compare import Comparison  # noqa: PLC0415 - loads numpy

        status.update(f"{self.title}: tracing")
        with redirect_stdout(sys.stderr):
            step = traced_step(self.target, real=self.real)
        self.notes = [step.note] if step.note else []
        return Comparison(step.trace, self.machine, 1, self.states)

    def problem(self, comparison: Comparison) -> Problem:
        """What is planned: with the margin that training leaves."""
        from outcore.runtime.margin import margin_bytes  # noqa: PLC0415 - with the others

        problem = comparison.problem(self.budget_bytes)
        margin = margin_bytes(self.budget_bytes)
        return replace(problem, outside_bytes=problem.outside_bytes + margin)

    def tell(self, error: InfeasibleError) -> None:
        """Let an error of that problem name the budget to write, which has a larger margin."""
        from outcore.runtime.margin import for_any_budget  # noqa: PLC0415 - with the others

        for_any_budget(error, self.budget_bytes)


def targeted(target: str, hardware: str, budget: str, states: int, *, real: bool) -> Targeted:
    """Look machine and budget up. Raises OptionValueError or BudgetError."""
    from outcore.compare import read_budget  # noqa: PLC0415 - loads numpy
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others

    machine = machine_of(hardware)
    nbytes = read_budget("--budget", budget, machine.hardware.capacity(Tier.DEVICE))
    return Targeted(target, machine, nbytes, states, real)
