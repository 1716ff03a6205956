"""Plan files, as arguments and as sources of plans for a step that is traced anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outcore.errors import DigestError

if TYPE_CHECKING:
    from outcore.ir.plan import Plan
    from outcore.ir.problem import Problem
    from outcore.planfile import PlanFile, SavedPlan

File = Annotated[Path, typer.Argument(help="A plan file.", show_default=False)]


def budget_of(file: PlanFile) -> str:
    """The budget that the file's plans were made for, as an option has it."""
    return f"{file.plans[0].budgets.device}B" if file.plans else "100%"


def plans_of(file: PlanFile, problem: Problem) -> tuple[SavedPlan, ...]:
    """Those in `file` for the trace of `problem`, one at least, not checked.

    Raises DigestError where there is none.
    """
    from outcore.ir.store import digest  # noqa: PLC0415 - with the others
    from outcore.planfile import find_all  # noqa: PLC0415 - loads numpy

    trace = digest(problem.trace)
    found = find_all(file, trace)
    if not found:
        made_for = ", ".join(plan.digests.trace for plan in file.plans)
        raise DigestError(noun="plan", made_for=made_for, expected=trace)
    return found


def plan_of(file: PlanFile, problem: Problem, name: str) -> Plan:
    """The first plan in the file `name` that is for `problem`.

    Raises DigestError where there is none for its trace, VerifyError where that is no plan for the
    problem, InfeasibleError where it does not fit.
    """
    from outcore.planfile import check_plan  # noqa: PLC0415 - loads numpy

    return check_plan(plans_of(file, problem)[0], problem, name=name)
