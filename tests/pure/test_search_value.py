"""start_by_value: the start of `search` that offloads what takes long to recompute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.policies.search import value as search_value
from outcore.policies.search.space import Kinds, Space, make_space
from outcore.policies.search.value import start_by_value
from tests.pure.building import dense_problem
from tests.pure.chainer_resnet import table3_problem
from tests.pure.test_search import GB

AGAIN = (RECOMPUTE, RECOMPUTE_STAY)


def started(problem: Problem, min_bytes: int = 1) -> tuple[Space, Evaluator, Kinds | None]:
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, min_bytes)
    found = start_by_value(space, evaluator)
    if found is None:
        return space, evaluator, None
    result = evaluator.evaluate(found.kinds)
    assert (result.seconds, result.fits) == (found.seconds, True)
    return space, evaluator, found.kinds


def test_what_takes_longer_a_byte_leaves():
    problem = table3_problem(640, 16 * GB, 13e9)
    space, _, kinds = started(problem)
    assert kinds is not None
    trace, producer = problem.trace, liveness(problem.trace).producer
    values: dict[int, list[float]] = {OFFLOAD: [], RECOMPUTE: []}
    for index, allowed in space.allowed.items():
        gap, kind = space.gaps[index], int(kinds[index])
        op = producer[gap.buffer]
        if kind != KEEP and op is not None and RECOMPUTE in allowed:
            nbytes = sum(trace.buffers[b].nbytes for b in trace.writes[op])
            values[OFFLOAD if kind == OFFLOAD else RECOMPUTE].append(
                problem.profile.seconds[op] / nbytes
            )
    assert max(values[RECOMPUTE]) <= min(values[OFFLOAD])
    assert len(values[RECOMPUTE]) > 10
    assert len(values[OFFLOAD]) > 10


def test_what_does_not_cross_the_boundary_stays_as_it_was():
    problem = table3_problem(640, 16 * GB, 13e9)
    space, evaluator, _ = started(problem)
    inside = next(i for i, g in enumerate(space.gaps) if g.before < problem.trace.boundary)
    others = space.default_kinds.copy()
    others[inside] = OFFLOAD
    found = start_by_value(replace(space, default_kinds=others), evaluator)
    assert found is not None
    assert found.kinds[inside] == OFFLOAD


def test_it_knows_when_to_stop():
    problem = table3_problem(640, 16 * GB, 13e9)
    space, evaluator, _ = started(problem)
    assert start_by_value(space, evaluator, deadline=0.0) is None


def test_a_plan_that_takes_very_long_is_none_to_begin_at(monkeypatch):
    problem = table3_problem(640, 16 * GB, 13e9)
    monkeypatch.setattr(search_value, "MOST_TIMES", 1)
    assert started(problem)[2] is None


def test_without_an_outer_tier_what_is_dead_stays():
    problem = replace(dense_problem(4, 11 * 1024), host_budget_bytes=0)
    space, _, kinds = started(problem)
    assert kinds is not None
    dead = np.array([gap.dead for gap in space.gaps])
    assert set(kinds[dead]) == {KEEP}
    assert set(kinds[~dead]) <= {KEEP, *AGAIN}


def test_where_nothing_fits_there_is_none():
    assert started(dense_problem(4, 1024))[2] is None
