"""Walk: it ends at an allowed plan with the stated time; limits end evaluations early."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.evaluate.walk import Walk
from outcore.policies import floor_plan
from outcore.policies.floor import floor
from outcore.policies.search.space import Space, make_space
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import problems
from tests.pure.test_evaluate import some_hints, some_kinds
from tests.pure.test_policies import chain

pytestmark = pytest.mark.xdist_group("compiled")

GB = 10**9
HOT, COLD = 1e-2, 1e-4


def space_of(evaluator: Evaluator) -> Space:
    return make_space(evaluator.problem, evaluator, 1)


def walk_of(evaluator: Evaluator, space: Space, seed: int = 0) -> Walk:
    return evaluator.walk(space.allowed, space.alike, seed)


@settings(max_examples=60)
@given(problem=problems(), seed=st.integers(0, 99))
def test_what_it_finds_fits_and_takes_what_it_says(problem, seed):
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    evaluator = Evaluator(tight)
    space = space_of(evaluator)
    assume(space.allowed)
    start = space.kinds(floor_plan(tight))
    first = evaluator.evaluate(start)
    assume(first.fits)
    walk = walk_of(evaluator, space, seed)
    walk.begin(start, first.seconds)
    kinds, seconds = walk.go(300, HOT, COLD)
    found = evaluator.evaluate(kinds)
    assert found.fits
    assert found.seconds == seconds <= first.seconds
    for gap, kind in enumerate(kinds.tolist()):
        assert kind in space.allowed.get(gap, (start[gap],))


@settings(max_examples=60)
@given(problem=problems(), dice=st.randoms(use_true_random=False))
def test_a_limit_gives_up_just_what_is_over_it(problem, dice):
    evaluator = Evaluator(problem)
    kinds = np.array(some_kinds(problem, evaluator.gaps, dice), np.int8)
    release, prefetch = (np.array(some_hints(evaluator.gaps, dice), np.int64) for _ in range(2))
    whole = evaluator.evaluate(kinds, release=release, prefetch=prefetch)
    assume(0 < whole.seconds < math.inf)

    def limited(limit: float) -> tuple[float, int, int] | None:
        return evaluator.runner.run(kinds, release, prefetch, limit)

    figures = (whole.seconds, whole.peak_bytes, whole.outer_bytes) if whole.fits else None
    for limit in (whole.seconds, whole.seconds * 1.5, 1e9):
        assert limited(limit) == figures
    for limit in (whole.seconds * (1 - 1e-6), whole.seconds / 2, 1e-12):
        assert limited(limit) is None
    assert evaluator.evaluate(kinds, release=release, prefetch=prefetch) == whole


def test_the_same_seed_makes_the_same_walk():
    problem = table3_problem(384, 16 * GB, 13e9)
    found = []
    for seed in (3, 3, 4):
        evaluator = Evaluator(problem)
        space = space_of(evaluator)
        walk = walk_of(evaluator, space, seed)
        start = space.kinds(floor_plan(problem))
        walk.begin(start, evaluator.evaluate(start).seconds)
        found.append(walk.go(2000, HOT, COLD))
    assert found[0][1] == found[1][1]
    assert (found[0][0] == found[1][0]).all()
    assert (found[0][0] != found[2][0]).any()


def test_it_goes_everywhere():
    """If any change is accepted, every gap takes each of its allowed kinds at some time."""
    problem = chain((64,) * 6)
    evaluator = Evaluator(problem)
    space = space_of(evaluator)
    seen: dict[int, set[int]] = {gap: set() for gap in space.allowed}
    walk = walk_of(evaluator, space)
    for _ in range(400):
        walk.begin(np.full(len(space.gaps), KEEP, np.int8), math.inf)  # anything is better
        kinds, _ = walk.go(1, 1e9, 1e9)
        for gap, kinds_seen in seen.items():
            kinds_seen.add(int(kinds[gap]))
    assert all(kinds == {KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY} for kinds in seen.values())


def test_it_begins_with_what_is_allowed():
    evaluator = Evaluator(chain((64,) * 4))
    space = space_of(evaluator)
    walk = evaluator.walk(dict.fromkeys(space.allowed, (KEEP, OFFLOAD)), (), 0)
    kinds = np.full(len(space.gaps), RECOMPUTE, np.int8)
    with pytest.raises(ValueError, match=r"gap \d+ is of kind 2"):
        walk.begin(kinds, math.inf)


@pytest.mark.parametrize(("hot", "cold"), [(0.0, 0.0), (1.0, 2.0), (math.inf, 1.0), (1.0, -1.0)])
def test_it_cools_down(hot, cold):
    evaluator = Evaluator(chain((64,) * 4))
    with pytest.raises(ValueError, match="cools down"):
        walk_of(evaluator, space_of(evaluator)).go(10, hot, cold)


@pytest.mark.parametrize("rows", [-0.1, 1.0, math.nan])
def test_rows_are_a_part_of_the_changes(rows):
    evaluator = Evaluator(chain((64,) * 4))
    with pytest.raises(ValueError, match="a part of the changes"):
        walk_of(evaluator, space_of(evaluator)).go(10, 1.0, 0.1, rows=rows)


def test_a_row_is_of_gaps_alike():
    evaluator = Evaluator(chain((64, 32) * 6))
    space = space_of(evaluator)
    most = 0
    for seed in range(20):
        walk = walk_of(evaluator, space, seed)
        walk.begin(np.full(len(space.gaps), KEEP, np.int8), math.inf)
        kinds, _ = walk.go(1, 1e9, 1e9, rows=0.999999)
        changed = np.flatnonzero(kinds)
        sizes = {evaluator.problem.trace.buffers[space.gaps[gap].buffer].nbytes for gap in changed}
        assert len(sizes) == len({int(kind) for kind in kinds[changed]}) <= 1
        most = max(most, len(changed))
    assert most > 3


def test_layers_become_like_one_of_them():
    evaluator = Evaluator(chain((64, 32) * 8))
    space = space_of(evaluator)
    layers = tuple(range(0, 14, 2)), tuple(range(1, 14, 2))
    kinds_of_one = OFFLOAD, RECOMPUTE
    start = np.full(len(space.gaps), KEEP, np.int8)
    start[[2, 3]] = kinds_of_one
    counts = set()
    for seed in range(400):
        walk = evaluator.walk(space.allowed, layers, seed)
        walk.begin(start, math.inf)
        kinds, _ = walk.go(1, 1e9, 1e9, rows=0.999999)
        found = list(zip(*(kinds[list(group)].tolist() for group in layers), strict=True))
        if set(found) <= {kinds_of_one, (KEEP, KEEP)}:
            counts.add(found.count(kinds_of_one))
    assert counts > {0, 1, 2, 3}


def test_a_clock_that_has_run_out_ends_it(monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("outcore.evaluate.walk.time.perf_counter", lambda: float(next(ticks)))
    evaluator = Evaluator(chain((64,) * 4))
    walk = walk_of(evaluator, space_of(evaluator))
    walk.go(10**7, 1.0, 0.1, most_seconds=5.0)
    assert next(ticks) < 20


def test_what_does_not_fit_is_never_the_best():
    problem = chain((64,) * 12)
    tight = replace(problem, budget_bytes=2 * floor(problem).nbytes)
    evaluator = Evaluator(tight)
    space = space_of(evaluator)
    start = np.full(len(space.gaps), KEEP, np.int8)
    assert not evaluator.evaluate(start).fits
    walk = walk_of(evaluator, space)
    walk.begin(start, math.inf)
    kinds, seconds = walk.go(3000, HOT, COLD)
    found = evaluator.evaluate(kinds)
    assert found.fits
    assert seconds == found.seconds


@pytest.mark.parametrize("allowed", [{}, {0: (KEEP,)}])
def test_it_needs_somewhere_to_go(allowed):
    with pytest.raises(ValueError, match="two kinds or more"):
        Evaluator(chain((64,) * 4)).walk(allowed, (), 0)


def test_tables_that_grow_on_the_way_change_nothing():
    """More and more ops run again: the walk continues at the step whose tables were too small."""
    problem = chain((64,) * 30)
    ample, short = Evaluator(problem), Evaluator(problem)
    ample.runner.space = 64
    ample.runner._grow()
    short.runner.space = 1
    short.runner._make_tables()
    found = []
    for evaluator in (ample, short):
        space = space_of(evaluator)
        allowed = dict.fromkeys(space.allowed, (KEEP, RECOMPUTE))
        walk = evaluator.walk(allowed, (), 5)
        walk.begin(np.full(len(space.gaps), KEEP, np.int8), math.inf)
        found.append(walk.go(3000, 1e9, 1e9))
    assert short.runner.space > 1
    assert found[0][1] == found[1][1]
    assert (found[0][0] == found[1][0]).all()
