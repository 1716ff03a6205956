"""Checking a saved plan against the problem at hand."""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import DigestError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.planfile.nouns import PlanFile, SavedPlan
from outcore.policies import staging_needed
from outcore.policies.settle import excess_bytes, refuse


def find(file: PlanFile, trace_digest: str, earlier: int = 0) -> SavedPlan | None:
    """The plan in `file` that was made for that trace, if there is one.

    Of several, that after `earlier` others: as many graphs of that trace come before, in order of
    capture. Where there are fewer, the last.
    """
    found = find_all(file, trace_digest)
    return found[min(earlier, len(found) - 1)] if found else None


def find_all(file: PlanFile, trace_digest: str) -> tuple[SavedPlan, ...]:
    """The plans in `file` that were made for that trace, in order of capture."""
    return tuple(saved for saved in file.plans if saved.digests.trace == trace_digest)


def check_plan(saved: SavedPlan, problem: Problem, *, strict: bool = False, name: str = "") -> Plan:
    """The plan that was saved, verified for `problem` and lowered: it fits.

    Times, links and budgets may be others than those it was made with, unless `strict`. `name`: its
    file's, for messages. Raises DigestError where it was made for another trace, with `strict` also
    for other hardware or another profile; VerifyError where it is no plan for the problem;
    InfeasibleError where it does not fit, with the smallest budget at which it does.
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
    lower(problem, plan)  # verified, pass by pass
    check_saved_fits(problem, plan, name)
    return plan


def check_saved_fits(problem: Problem, plan: Plan, name: str = "") -> None:
    """Raise InfeasibleError where `plan` needs more of a tier than the problem has.

    What goes to a disk beyond the host takes host memory on its way, as `overflow` has it.
    """
    over = excess_bytes(problem, lower(problem, plan, fast=True))
    if problem.hardware.capacity(Tier.HOST):
        over[Tier.HOST] += staging_needed(problem.trace, plan)
    refuse(problem, plan, over, f"the plan in {name}" if name else plan.policy)
