"""judge: what one plan takes, by arrays where they can say it."""

from __future__ import annotations

from outcore.evaluate import Evaluation, Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, tier_bytes
from outcore.ir.plan import Plan
from outcore.lower import lower
from outcore.simulate import simulate


def judge(evaluator: Evaluator, plan: Plan) -> Evaluation:
    """What `plan` takes, its hints followed. Raises as `lower` does where no array can say it."""
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
