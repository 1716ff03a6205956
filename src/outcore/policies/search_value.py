"""A start for `search`: what takes long to make again leaves, the rest is made again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.policies.search_space import Kinds, Space
from outcore.policies.search_walks import Found

SHARES = tuple(share / 10 for share in range(11))
"""What part of all values is so low that what has it is made again, in the plans looked at."""

AGAIN = RECOMPUTE, RECOMPUTE_STAY
"""How."""

DEAD = KEEP, OFFLOAD, RECOMPUTE
"""What becomes of what is dead."""

MOST_TIMES = 4
"""A plan whose step takes longer than so many in-core is none to begin at. In deep networks reruns
may be as many as the square of the ops."""


def start_by_value(space: Space, evaluator: Evaluator, deadline: float = inf) -> Found | None:
    """The fastest plan, of some, that offloads what takes most seconds a byte to make again.

    All else that crosses the boundary is made again. It loses more than the plans of other policies
    as a rule, but much that can be improved on lies near it: they offload what is at hand, and a
    single change seldom gains by trading that for what is worth more. What does not cross it, or is
    not in the space, is as by default. None where none fits; no more are looked at after
    `deadline`, a time of `time.perf_counter`.
    """
    problem = evaluator.problem
    limit = MOST_TIMES * sum(problem.profile.seconds)
    if not limit:  # it would bound no reruns
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
    """A plan for each share, each way to make it again, and each fate of what is dead."""
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
    """What is wanted, else to offload, else what is usual."""
    if wanted in allowed:
        return wanted
    return OFFLOAD if OFFLOAD in allowed else usual


def _values(problem: Problem, space: Space, gaps: Sequence[int]) -> list[float]:
    """Of each gap the seconds that it takes to make a byte of its buffer; inf where no op can."""
    trace, producer = problem.trace, liveness(problem.trace).producer
    found = []
    for index in gaps:
        op = producer[space.gaps[index].buffer]
        nbytes = 0 if op is None else sum(trace.buffers[b].nbytes for b in trace.writes[op])
        found.append(inf if op is None else problem.profile.seconds[op] / max(1, nbytes))
    return found
