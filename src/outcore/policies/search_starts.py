"""Where `search` starts from: what the other policies make of the problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outcore.errors import InfeasibleError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.chen import ChenSqrt
from outcore.policies.floor import floor_plan
from outcore.policies.policy import Policy
from outcore.policies.pooch import Pooch
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.superneurons import SuperNeurons
from outcore.policies.swap_opt import SwapOpt
from outcore.policies.window import Window

MANY_OPS = 4000
"""With more ops than this only the floor's plan is asked for: where layers repeat, walks get from
there to better plans sooner than other policies make theirs."""

MANY_RERUNS = 1000
"""With more ops than this not the one whose reruns may be as many as the square of them."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Plans that fit, and what those policies need that have none."""

    plans: tuple[Plan, ...]
    refusals: tuple[InfeasibleError, ...]


def find_starts(problem: Problem, min_bytes: int) -> Starts:
    """Ask each policy, the floor's plan last."""
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    for policy in _policies(problem, min_bytes):
        try:
            plans.append(policy.plan(problem))
        except InfeasibleError as error:
            refusals.append(error)
    try:
        plans.append(floor_plan(problem))
    except InfeasibleError as error:
        refusals.append(error)
    return Starts(tuple(plans), tuple(refusals))


def _policies(problem: Problem, min_bytes: int) -> Iterator[Policy]:
    if len(problem.trace.ops) <= MANY_RERUNS:
        yield SuperNeurons(min_bytes)
    if len(problem.trace.ops) <= MANY_OPS:
        yield SwapOpt(min_bytes, early=True)
        yield ChenSqrt(min_bytes)
        yield Window(min_bytes)
        yield Pooch(min_bytes, early=True)
        yield RecomputeAll(min_bytes, max_ops=4, stay=True)
