"""Plans of files, for commands that trace the step anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.errors import DigestError

if TYPE_CHECKING:
    from outcore.ir.plan import Plan
    from outcore.ir.problem import Problem
    from outcore.planfile import PlanFile


def budget_of(file: PlanFile) -> str:
    """The budget that the file's plans were made for, as an option has it."""
    return f"{file.plans[0].budgets.device}B" if file.plans else "100%"


def plan_of(file: PlanFile, problem: Problem, name: str) -> Plan:
    """The plan in the file `name` that is for `problem`.

    Of several for its trace, the first. Raises DigestError where it has none for that trace,
    VerifyError where that is no plan for the problem, InfeasibleError where it does not fit.
    """
    from outcore.ir.store import digest  # noqa: PLC0415 - with the others
    from outcore.planfile import check_plan, find  # noqa: PLC0415 - loads numpy

    trace = digest(problem.trace)
    saved = find(file, trace)
    if saved is None:
        made_for = ", ".join(plan.digests.trace for plan in file.plans)
        raise DigestError(noun="plan", made_for=made_for, expected=trace)
    return check_plan(saved, problem, name=name)
