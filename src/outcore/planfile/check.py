"""check: find the plan for a graph in a file, and check it against the problem at hand."""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import DigestError, InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import staging_needed
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.planfile.nouns import PlanFile, SavedPlan
from outcore.policies.settle import excess_bytes, refuse


def find(file: PlanFile, trace_digest: str, earlier: int = 0) -> SavedPlan | None:
    """The plan in `file` for the trace with this digest, if there is one.

    If there are several, the one after `earlier` others, where `earlier` is the number of graphs
    with the same trace that were captured before. If there are too few, the last one.
    """
    found = find_all(file, trace_digest)
    return found[min(earlier, len(found) - 1)] if found else None


def find_all(file: PlanFile, trace_digest: str) -> tuple[SavedPlan, ...]:
    """The plans in `file` for the trace with this digest, in order of capture."""
    return tuple(saved for saved in file.plans if saved.digests.trace == trace_digest)


def check_plan(saved: SavedPlan, problem: Problem, *, strict: bool = False, name: str = "") -> Plan:
    """The saved plan, once it is verified and lowered for `problem`, and is known to fit.

    Times, links and budgets may differ from those it was made with, unless `strict`. `name` is the
    name of its file, for messages.

    Raises DigestError if it was made for another trace, or, with `strict`, for other hardware or
    another profile. Raises as `check_saved` does; InfeasibleError names the smallest budget that
    works.
    """
    digests = saved.digests
    named = [("trace", digests.trace, digest(problem.trace))]
    if strict:
        named.append(("hardware", digests.hardware, digest(problem.hardware)))
        named.append(("profile", digests.profile, digest(problem.profile)))
    for of, made_for, expected in named:
        if made_for != expected:
            raise DigestError(noun="plan", made_for=made_for, expected=expected, of=of, file=name)
    plan = replace(saved.plan(), problem_digest=digest(problem))
    check_saved(problem, plan, name)
    return plan


def check_saved(problem: Problem, plan: Plan, name: str = "") -> None:
    """Verify and lower `plan`, from the file `name`, and check that it fits.

    What goes to a disk because the host is full needs some host memory on its way (`overflow`).

    Raises VerifyError if it is not a plan for the problem; InfeasibleError if it needs more of a
    tier than there is.
    """
    over = excess_bytes(problem, lower(problem, plan))  # verified, pass by pass
    if problem.hardware.capacity(Tier.HOST):
        over[Tier.HOST] += staging_needed(problem.trace, plan)
    try:
        refuse(problem, plan, over, plan.policy)
    except InfeasibleError as error:
        raise replace(error, plan_file=name) from None
