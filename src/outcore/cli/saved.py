"""saved: find the plans in a plan file for a step that was traced again."""

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
    """The budget that the file's first plan was made for, in the form of an option's value."""
    return f"{file.plans[0].budgets.device}B" if file.plans else "100%"


def plans_of(file: PlanFile, problem: Problem) -> tuple[SavedPlan, ...]:
    """The plans in `file` for the trace of `problem`, at least one, not checked.

    Raises DigestError if there is none.
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

    Raises DigestError if the file has none for its trace, VerifyError if the plan is not valid for
    the problem, InfeasibleError if it does not fit.
    """
    from outcore.planfile import check_plan  # noqa: PLC0415 - loads numpy

    return check_plan(plans_of(file, problem)[0], problem, name=name)
