"""Where `search` starts from: what the other policies make of the problem."""

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
from outcore.policies.pooch import Pooch
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.superneurons import SuperNeurons
from outcore.policies.swap_opt import SwapOpt
from outcore.policies.window import Window

Maker: TypeAlias = Callable[[Problem], Plan]

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


def find_starts(problem: Problem, min_bytes: int, deadline: float = inf) -> Starts:
    """Ask each policy, after the floor's plan; no more of them after `deadline`.

    That is a time of `time.perf_counter`.
    """
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    rule = SuperNeurons(min_bytes).as_it_is  # what its plan would need takes more plans to say
    for make in (floor_plan, *_makers(problem, min_bytes, rule)):
        if plans and time.perf_counter() > deadline:
            break
        try:
            plans.append(make(problem))
        except InfeasibleError as error:
            if make != rule:
                refusals.append(error)
    return Starts(tuple(plans), tuple(refusals))


def _makers(problem: Problem, min_bytes: int, rule: Maker) -> Iterator[Maker]:
    if len(problem.trace.ops) <= MANY_RERUNS:
        yield rule
    if len(problem.trace.ops) <= MANY_OPS:
        yield SwapOpt(min_bytes, early=True).plan
        yield ChenSqrt(min_bytes).plan
        yield Window(min_bytes).plan
        yield Pooch(min_bytes, early=True).plan
        yield RecomputeAll(min_bytes, max_ops=4, stay=True).plan
