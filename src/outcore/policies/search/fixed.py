"""fixed: run `search` with some choices fixed; it does not decide on those gaps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from outcore.errors import InfeasibleError
from outcore.evaluate import Evaluation, Evaluator
from outcore.ir.plan import KEEP_ALL, Choice, Gap, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.policies.floor import leanest, plan_floor
from outcore.policies.search.anneal import Annealing
from outcore.policies.search.brief import begin
from outcore.policies.search.judge import judge
from outcore.policies.search.search import Search
from outcore.policies.search.space import Kinds, Space, kind_of, make_space
from outcore.policies.search.starts import find_starts
from outcore.policies.settle import settle

ROUNDING = 1e-9
"""The same sum, added up in another order, may differ by this fraction."""


def with_fixed(plan: Plan, fixed: Mapping[Gap, Choice]) -> dict[Gap, Choice]:
    """The choices of `plan`, with `fixed` ones instead.

    A choice of `plan` that is of the same type as the fixed one stays, with its own hints.
    """
    changed = {g: c for g, c in fixed.items() if type(plan.choice(g)) is not type(c)}
    return plan.by_gap | changed


def search_fixed(problem: Problem, search: Search, fixed: Mapping[Gap, Choice]) -> Plan:
    """The fastest plan that `search` finds with the choices of `fixed`.

    Raises InfeasibleError, with the smallest budget at which there is a plan, if none of its starts
    fits with them.
    """
    deadline = time.perf_counter() + search.seconds if search.seconds else inf
    evaluator = Evaluator(problem)
    kept = make_plan(with_fixed(KEEP_ALL, fixed))
    if not problem.profile.alternatives and _costs_nothing(judge(evaluator, kept), problem):
        return settle(problem, kept.by_gap, search)
    plans = _starts(problem, search, fixed, deadline)
    return search.fastest(
        evaluator, plans, partial(_begin, evaluator, search, fixed, plans), deadline
    )


def _costs_nothing(found: Evaluation, problem: Problem) -> bool:
    """Whether a plan fits and takes no longer than its ops: no plan is faster."""
    return found.fits and found.seconds <= sum(problem.profile.seconds) * (1 + ROUNDING)


def _begin(
    evaluator: Evaluator,
    search: Search,
    fixed: Mapping[Gap, Choice],
    plans: Sequence[Plan],
    min_bytes: int,
) -> Annealing:
    """Start from the best of `plans`."""
    space = _without(make_space(evaluator.problem, evaluator, min_bytes), fixed)
    starts = (_kinds(space, plan, fixed) for plan in plans)
    return begin(evaluator, space, starts, search.seed)


def _starts(
    problem: Problem, search: Search, fixed: Mapping[Gap, Choice], deadline: float
) -> list[Plan]:
    """The usual starts of `search`, everything kept, and the leanest plan, each with `fixed`.

    Only those that fit. Raises InfeasibleError if none does.
    """
    lean = leanest(problem)[1]
    known = (KEEP_ALL, *find_starts(problem, search.min_bytes, deadline).plans, lean)
    merged = [make_plan(with_fixed(p, fixed), variants=p.by_op) for p in known]
    found = []
    for plan in merged:
        with suppress(InfeasibleError):
            found.append(settle(problem, plan.by_gap, search, plan.by_op))
    if not found:
        least = min(merged, key=lambda plan: plan_floor(problem, plan).nbytes)
        found.append(settle(problem, least.by_gap, search, least.by_op))  # raises: does not fit
    return found


def _kinds(space: Space, plan: Plan, fixed: Mapping[Gap, Choice]) -> Kinds:
    """The kinds of a plan that has the choices of `fixed`."""
    kinds = space.kinds(plan)
    for index, gap in enumerate(space.gaps):
        if gap in fixed:
            kinds[index] = kind_of(plan, gap)
    return kinds


def _without(space: Space, fixed: Mapping[Gap, Choice]) -> Space:
    """The space without the gaps of `fixed`, which are fixed as its defaults."""
    left = space.without([i for i in space.allowed if space.gaps[i] in fixed])
    return replace(left, default_kinds=_kinds(space, make_plan(dict(fixed)), fixed))
