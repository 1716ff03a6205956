"""settle: turn a policy's choices into a plan that is known to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import tier_bytes
from outcore.ir.plan import Choice, Gap, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.policies.floor import infeasible, plan_floor
from outcore.policies.policy import Policy
from outcore.spec import spec_text

TRIES = 4
"""How often `settle_within` chooses, each time within less memory, before it gives up."""


def settle(
    problem: Problem,
    choices: Mapping[Gap, Choice],
    policy: Policy,
    variants: Mapping[int, int] | None = None,
) -> Plan:
    """The plan of `choices` and `variants` (op -> variant), lowered once to check that it fits.

    Raises InfeasibleError with the smallest budget that these choices can meet.
    """
    digests = digest(problem), digest(problem.trace)
    plan = make_plan(dict(choices), spec_text(policy), *digests, variants)
    check_fits(problem, plan, plan.policy)
    return plan


def settle_within(
    problem: Problem,
    capacity_bytes: int,
    choose: Callable[[int], Mapping[Gap, Choice] | None],
    otherwise: Mapping[Gap, Choice],
    policy: Policy,
) -> Plan:
    """The plan of what `choose` chooses within `capacity_bytes`, or of `otherwise`.

    `choose` returns None if, by the policy's model, nothing fits. If the lowered program does not
    fit although the model says so, it chooses again with its capacity reduced by the excess. Raises
    InfeasibleError if `otherwise` does not fit either, or if an outer tier is too small.
    """
    for _ in range(TRIES):
        choices = choose(capacity_bytes)
        if choices is None:
            break
        try:
            return settle(problem, choices, policy)
        except InfeasibleError as error:
            if error.tier != Tier.DEVICE.value:
                raise
            capacity_bytes -= error.floor_bytes - problem.budget_bytes
    return settle(problem, otherwise, policy)


def check_fits(problem: Problem, plan: Plan, policy: str) -> None:
    """Raise InfeasibleError, in the name of `policy`, if `plan` needs more than there is."""
    check_program(problem, plan, lower(problem, plan, fast=True), policy)


def check_program(problem: Problem, plan: Plan, program: Program, policy: str) -> None:
    """Raise InfeasibleError as `check_fits`, for a `plan` that is already lowered to `program`."""
    refuse(problem, plan, excess_bytes(problem, program), policy)


def refuse(problem: Problem, plan: Plan, over: Mapping[Tier, int], policy: str) -> None:
    """Raise InfeasibleError if `plan` exceeds a tier's limit: `over` has the bytes beyond it."""
    for tier in (tier for tier in Tier if over[tier] > 0):
        if tier is Tier.DEVICE:
            raise infeasible(problem, plan_floor(problem, plan), policy)
        raise outer_too_small(problem, tier, over[tier], policy)


def excess_bytes(problem: Problem, program: Program) -> dict[Tier, int]:
    """The bytes that a program needs of each tier beyond its limit; negative if it needs less."""
    return {tier: tier_bytes(problem, program, tier) - problem.limit_bytes(tier) for tier in Tier}


def outer_too_small(problem: Problem, tier: Tier, over: int, policy: str) -> InfeasibleError:
    """The error for an outer tier that lacks `over` bytes for what `policy` offloads."""
    limit = problem.limit_bytes(tier)
    return InfeasibleError(
        budget_bytes=limit,
        floor_bytes=limit + over,
        op="the offloaded data",
        policy=policy,
        needed_bytes=limit + over,
        tier=tier.value,
    )
