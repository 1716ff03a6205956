"""value: a start for `search`: offload what is slow to recompute, recompute the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.policies.search.space import Kinds, Space
from outcore.policies.search.walks import Found

SHARES = tuple(share / 10 for share in range(11))
"""Thresholds that are tried: buffers are recomputed if their value is in this lowest share of all
distinct values, otherwise offloaded."""

AGAIN = RECOMPUTE, RECOMPUTE_STAY
"""The kinds of recomputation that are tried."""

DEAD = KEEP, OFFLOAD, RECOMPUTE
"""The kinds that are tried for dead gaps."""

MOST_TIMES = 4
"""A plan whose step takes more than this many times the in-core time is no start. In deep networks
reruns may be as many as the square of the ops."""


def start_by_value(space: Space, evaluator: Evaluator, deadline: float = inf) -> Found | None:
    """The fastest of some plans that offload what needs the most seconds per byte to recompute.

    Everything else that crosses the boundary is recomputed. Usually this start loses more than the
    plans of other policies, but better plans lie near it. The other policies offload what is at
    hand, and a single change seldom gains by trading that for what is worth more. Gaps that do not
    cross the boundary, or are not in the space, are at their default. None if no plan fits; none is
    tried after `deadline`, a time of `time.perf_counter`.
    """
    problem = evaluator.problem
    limit = MOST_TIMES * sum(problem.profile.seconds)
    if not limit:  # without a limit nothing would bound reruns
        return None
    best = None
    for kinds in _plans(problem, space):
        if time.perf_counter() > deadline:
            break
        found = evaluator.evaluate(kinds, limit=limit)
        if found.fits and (best is None or found.seconds < best.seconds):
            best = Found(kinds, found.seconds)
    return best


def _plans(problem: Problem, space: Space) -> Iterator[Kinds]:
    """A plan for each share, each kind of recomputation, and each kind for dead gaps."""
    boundary = problem.trace.boundary
    crossing = [i for i in space.allowed if space.gaps[i].after < boundary <= space.gaps[i].before]
    values = _values(problem, space, crossing)
    ranked = sorted(set(values))
    if not ranked:
        return
    fates = DEAD if any(space.gaps[index].dead for index in crossing) else (RECOMPUTE,)
    for share, again, dead in product(SHARES, AGAIN, fates):
        least = ranked[min(len(ranked) - 1, int(share * len(ranked)))]
        kinds = space.default_kinds.copy()
        for index, value in zip(crossing, values, strict=True):
            usual = OFFLOAD if value > least else again
            wanted = dead if space.gaps[index].dead else usual
            kinds[index] = _nearest(wanted, space.allowed[index], int(kinds[index]))
        yield kinds


def _nearest(wanted: int, allowed: Sequence[int], usual: int) -> int:
    """`wanted` if it is allowed, else OFFLOAD, else `usual`."""
    if wanted in allowed:
        return wanted
    return OFFLOAD if OFFLOAD in allowed else usual


def _values(problem: Problem, space: Space, gaps: Sequence[int]) -> list[float]:
    """Per gap, the seconds per byte that it takes to make its buffer; inf if no op makes it."""
    trace, producer = problem.trace, liveness(problem.trace).producer
    found = []
    for index in gaps:
        op = producer[space.gaps[index].buffer]
        nbytes = 0 if op is None else sum(trace.buffers[b].nbytes for b in trace.writes[op])
        found.append(inf if op is None else problem.profile.seconds[op] / max(1, nbytes))
    return found
