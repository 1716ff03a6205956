"""judge: evaluate one plan, by the fast Evaluator if it can represent the plan."""

from __future__ import annotations

from outcore.evaluate import Evaluation, Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, tier_bytes
from outcore.ir.plan import Plan
from outcore.lower import lower
from outcore.simulate import simulate


def judge(evaluator: Evaluator, plan: Plan) -> Evaluation:
    """The time and memory that `plan` needs, with its hints.

    The Evaluator cannot represent variants, `depart` and `arrive` hints, and tiers other than the
    nearest. Such a plan is lowered and simulated instead; errors of `lower` are passed on.
    """
    problem = evaluator.problem
    try:
        kinds, release, prefetch = evaluator.arrays(plan)
    except ValueError:
        program = lower(problem, plan, fast=True)
        device, outer = (
            tier_bytes(problem, program, tier) for tier in (Tier.DEVICE, problem.hardware.outer)
        )
        seconds = simulate(problem, program).seconds
        return Evaluation(seconds, device, outer, fits(problem, program))
    return evaluator.evaluate(kinds, release=release, prefetch=prefetch)
