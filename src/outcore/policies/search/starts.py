"""starts: make the plans that `search` starts from, by the other policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from outcore.errors import InfeasibleError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.chen import ChenSqrt
from outcore.policies.floor import floor_plan
from outcore.policies.pooch.pooch import Pooch
from outcore.policies.pooch.swap_opt import SwapOpt
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.superneurons.superneurons import SuperNeurons
from outcore.policies.window.window import Window

Maker: TypeAlias = Callable[[Problem], Plan]
"""A function that makes a plan, or raises InfeasibleError."""

MANY_OPS = 4000
"""With more ops than this, only the floor's plan is a start. If layers repeat, walks get from there
to better plans sooner than other policies plan."""

MANY_RERUNS = 1000
"""With more ops than this, `superneurons` is left out: its reruns may be as many as the square of
the ops."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The plans that fit, and the errors of the policies that have none."""

    plans: tuple[Plan, ...]
    refusals: tuple[InfeasibleError, ...]


def find_starts(problem: Problem, min_bytes: int, deadline: float = inf) -> Starts:
    """Make the floor's plan, then those of the other policies.

    None is made after `deadline`, a time of `time.perf_counter`, once there is a plan that fits.
    """
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    rule = SuperNeurons(min_bytes).plan_once  # `plan` would make more plans to name a budget
    for make in (floor_plan, *_makers(problem, min_bytes, rule)):
        if plans and time.perf_counter() > deadline:
            break
        try:
            plans.append(make(problem))
        except InfeasibleError as error:
            if make != rule:
                refusals.append(error.with_traceback(None))  # it would keep callers' data
    return Starts(tuple(plans), tuple(refusals))


def _makers(problem: Problem, min_bytes: int, rule: Maker) -> Iterator[Maker]:
    """The policies to start from, in order, for the size of the trace."""
    if len(problem.trace.ops) <= MANY_RERUNS:
        yield rule
    if len(problem.trace.ops) <= MANY_OPS:
        yield SwapOpt(min_bytes, early=True).plan
        yield ChenSqrt(min_bytes).plan
        yield Window(min_bytes).plan
        yield Pooch(min_bytes, early=True).plan
        yield RecomputeAll(min_bytes, max_ops=4, stay=True).plan
