"""search: never slower than its starts, and the best plan if that can be known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore.bound import lower_bound
from outcore.errors import InfeasibleError, PolicyError, VerifyError
from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.evaluate.walk import Walk
from outcore.ir.hardware import Link
from outcore.ir.memory import fits
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost
from outcore.ir.verify_plan import verify_plan
from outcore.lower import lower
from outcore.policies import floor, parse_policy, resolve, spec_text
from outcore.policies.floor import floor_plan
from outcore.policies.search.anneal import ROWS, ROWS_IN_DEEP, STAGES, Annealing, Effort
from outcore.policies.search.search import Search, evaluations, least
from outcore.policies.search.space import make_space
from outcore.policies.search.starts import find_starts
from outcore.policies.search.walks import Walks
from outcore.policies.superneurons.superneurons import SuperNeurons
from outcore.simulate import simulate
from tests.pure.building import relinked
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import plans, problems
from tests.pure.test_policies import chain

drawn = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
GB = 10**9
FEW = 6
"""The most gaps for which every plan is tried."""


def seconds(problem: Problem, policy: Search | str) -> float:
    return simulate(problem, lower(problem, resolve(policy).plan(problem))).seconds


@drawn
@given(problem=problems())
def test_it_is_never_slower_than_what_it_starts_from(problem):
    starts = find_starts(problem, 1)
    assume(starts.plans)
    known = [simulate(problem, lower(problem, plan)).seconds for plan in starts.plans]
    assert seconds(problem, Search(min_bytes=1, effort=0.001)) <= min(known)


@drawn
@given(problem=problems(), data=st.data())
def test_it_is_never_slower_than_what_is_known(problem, data):
    roomy = replace(problem, budget_bytes=1 << 40)
    known = [data.draw(plans(roomy)) for _ in range(3)]
    policy = Search(min_bytes=1, effort=0.0)
    times = [s for plan in known if (s := _seconds_where_it_fits(problem, plan)) is not None]
    try:
        found = policy.improve(problem, known)
    except InfeasibleError:
        assert not times
    else:
        assert found.policy == spec_text(policy)
        verify_plan(problem, found)
        assert simulate(problem, lower(problem, found)).seconds <= min(times, default=np.inf)


def _seconds_where_it_fits(problem: Problem, plan: Plan) -> float | None:
    try:
        program = lower(problem, plan)
    except VerifyError:
        return None  # it cannot be carried out
    return simulate(problem, program).seconds if fits(problem, program) else None


@drawn
@given(slow=problems(), times=st.sampled_from([1.01, 1.5, 4.0, 100.0]), data=st.data())
def test_over_a_faster_link_what_is_known_is_no_slower(slow, times, data):
    fast = relinked(
        slow, lambda _a, _b, link: Link(link.bytes_per_second * times, link.latency_seconds)
    )
    known = data.draw(plans(slow))
    before, after = (_seconds_where_it_fits(each, known) for each in (slow, fast))
    assume(before is not None)
    most = (before or 0.0) * (1 + 1e-12)
    assert after is not None
    assert after <= most
    found = Search(min_bytes=1, effort=0.0).improve(fast, [known])
    assert simulate(fast, lower(fast, found)).seconds <= most


@drawn
@given(problem=problems())
def test_it_finds_the_best_of_few_plans(problem):
    floor_bytes = floor(problem).nbytes
    tight = replace(problem, budget_bytes=max(problem.budget_bytes, floor_bytes))
    evaluator = Evaluator(tight)
    space = make_space(tight, evaluator, 1)
    assume(0 < len(space.allowed) <= FEW)
    best = float("inf")
    for choice in product(*space.allowed.values()):
        kinds = space.default_kinds.copy()
        kinds[list(space.allowed)] = choice
        found = evaluator.evaluate(kinds)
        best = min(best, found.seconds if found.fits else best)
    searched = seconds(tight, Search(min_bytes=1, effort=0.05))
    assert searched <= best * (1 + 1e-9)


@drawn
@given(problem=problems())
def test_no_plan_gets_below_the_lower_bound(problem):
    policy = Search(min_bytes=1, effort=0.002)
    try:
        found = seconds(problem, policy)
    except InfeasibleError:
        return
    assert found >= lower_bound(problem) * (1 - 1e-9)


def test_the_same_seed_and_effort_give_the_same_plan():
    problem = table3_problem(256, 16 * GB, 13e9)
    plans = [Search(effort=0.3, seed=seed).plan(problem) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0].choices != plans[2].choices


def test_a_seed_is_not_negative():
    with pytest.raises(PolicyError, match=r"seed=-1: it must be at least 0"):
        Search(seed=-1)


@pytest.mark.parametrize("cores", [1, 3])
def test_stages_give_the_same_plan_on_any_number_of_cores(cores, monkeypatch):
    problem = table3_problem(256, 16 * GB, 13e9)
    policy = Search(effort=4.0, walks=3)
    expected = policy.plan(problem)
    stages, go = [], Walks.go

    def gone(walks, stage, *given, **options):
        stages.append(stage)
        return go(walks, stage, *given, **options)

    monkeypatch.setattr("outcore.policies.search.walks.usable_cores", lambda: cores)
    monkeypatch.setattr(Walks, "go", gone)
    assert policy.plan(problem) == expected
    assert stages == list(STAGES)


def test_resnet50_comes_near_the_bound():
    problem = table3_problem(640, int(16.1 * GB), 12e9)
    plan = Search(effort=3.0).plan(problem)
    program = lower(problem, plan)
    assert fits(problem, program)
    in_core = sum(problem.profile.seconds)
    lost = 1 - in_core / simulate(problem, program).seconds
    others = [seconds(problem, spec) for spec in ("pooch{early=true}", "window", "swap-opt")]
    assert simulate(problem, program).seconds < min(others)
    assert 1 - in_core / lower_bound(problem) <= lost < 0.12, "pooch{early=true} loses 0.14"


def test_a_step_that_takes_no_time_cannot_be_improved():
    problem = chain((64,) * 6)
    idle = replace(problem.profile, seconds=(0.0,) * len(problem.trace.ops))
    tight = replace(problem, profile=idle, budget_bytes=300 * 1024)
    assert fits(tight, lower(tight, Search(effort=0.01).plan(tight)))


@pytest.mark.parametrize("evaluations", [0, 1, 7, 500])
def test_the_effort_bounds_the_evaluations(evaluations, monkeypatch):
    problem = table3_problem(512, 16 * GB, 13e9)
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, 1 << 16)
    annealing = Annealing(space, evaluator, seed=0)
    annealing.start(space.kinds(resolve("swap-opt{early=true}").plan(problem)))
    asked, walked = [], []
    evaluate, go = evaluator.evaluate, Walk.go

    def counted(kinds):
        asked.append(kinds)
        return evaluate(kinds)

    def gone(walk, steps, *given, **options):
        walked.append(steps)
        return go(walk, steps, *given, **options)

    monkeypatch.setattr(evaluator, "evaluate", counted)
    monkeypatch.setattr(Walk, "go", gone)
    annealing.run(Effort(evaluations, walks=2))
    assert len(walked) == (2 if evaluations else 0)
    assert len(set(walked)) <= 1
    assert 0.8 * evaluations <= len(asked) + sum(walked[:1]) <= evaluations


def test_more_walks_find_no_less():
    problem = table3_problem(512, 16 * GB, 13e9)
    one, two = (seconds(problem, Search(effort=0.4, walks=walks)) for walks in (1, 2))
    assert two <= one


def test_what_a_plan_says_beyond_arrays_is_judged_all_the_same():
    """With variants of its ops, a step may be faster than with everything kept."""
    problem = chain()
    cost = Cost(0.0, 0)
    faster = tuple((op.id, (cost,)) for op in problem.trace.ops)
    quick = replace(problem, profile=replace(problem.profile, alternatives=faster))
    kept = sum(problem.profile.seconds)
    assert seconds(quick, Search(min_bytes=1, effort=0.01)) <= kept


def test_what_fits_is_kept():
    assert Search().plan(chain()).choices == ()


def test_nothing_is_moved_for_nothing():
    problem = table3_problem(256, 16 * GB, 75e9)
    plan = Search(effort=0.5).plan(problem)
    took = simulate(problem, lower(problem, plan)).seconds
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, Search().min_bytes)
    kinds = space.kinds(plan)
    assert plan.choices
    for index in np.flatnonzero(kinds != space.default_kinds):
        fewer = kinds.copy()
        fewer[index] = space.default_kinds[index]
        found = evaluator.evaluate(fewer)
        assert not found.fits or found.seconds > took * (1 - 1e-12)


def test_where_nothing_fits_with_small_buffers_kept_they_are_moved_too():
    problem = chain((512, 8) * 6)
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    found = seconds(tight, Search(min_bytes=1 << 20, effort=0.5))
    assert found == seconds(tight, Search(min_bytes=1, effort=0.5))
    assert found < simulate(tight, lower(tight, floor_plan(tight))).seconds


def test_the_space_has_what_each_gap_may_be():
    problem = chain((64,) * 4)
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, 1)
    every = (KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY)
    assert set(space.allowed.values()) == {every}
    bare = replace(problem, host_budget_bytes=0)
    assert set(make_space(bare, evaluator, 1).allowed.values()) == {
        (KEEP, RECOMPUTE, RECOMPUTE_STAY)
    }
    assert make_space(problem, evaluator, 1 << 40).allowed == {}


def test_layers_that_repeat_are_alike():
    problem = chain((64, 64, 64, 32, 32, 64))
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, 1)
    sizes = [
        {problem.trace.buffers[space.gaps[i].buffer].nbytes for i in group} for group in space.alike
    ]
    assert all(len(each) == 1 for each in sizes)
    assert {32 * 1024} in sizes
    assert {64 * 1024} in sizes


@pytest.mark.parametrize("effort", [-1.0, float("nan"), float("inf")])
def test_an_effort_is_a_number_of_ops(effort):
    with pytest.raises(PolicyError, match="millions of ops"):
        Search(effort=effort)


def test_walks_and_their_time_are_checked():
    with pytest.raises(PolicyError, match="walks=0: it must be at least 1"):
        Search(walks=0)
    with pytest.raises(PolicyError, match="seconds=-1"):
        Search(seconds=-1.0)


def test_a_limit_in_seconds_still_gives_a_plan():
    problem = table3_problem(512, 16 * GB, 13e9)
    (first,) = find_starts(problem, 1 << 16, deadline=0.0).plans
    found = Search(seconds=1e-6).plan(problem)
    assert fits(problem, lower(problem, found))
    assert (
        seconds(problem, Search(seconds=1e-6)) <= simulate(problem, lower(problem, first)).seconds
    )


def test_where_time_is_short_repeated_layers_are_moved_together(monkeypatch):
    seen = []

    def go(walk, *_, rows, **__):
        seen.append(rows)
        return walk._kinds, 1.0

    monkeypatch.setattr(Walk, "go", go)
    problem = table3_problem(512, 16 * GB, 13e9)
    Search(walks=1, effort=1e6).plan(problem)
    Search(walks=1, effort=1e6, seconds=1e-6).plan(problem)
    assert seen == [ROWS] * len(STAGES) + [ROWS_IN_DEEP]


def test_a_refusal_names_the_least_that_is_needed():
    problem = replace(chain(), budget_bytes=1000)
    refusals = find_starts(problem, 1).refusals
    assert len(refusals) > 3
    assert least(refusals).floor_bytes == min(error.floor_bytes for error in refusals)
    with pytest.raises(InfeasibleError) as caught:
        parse_policy("search{min_bytes=1B}").plan(problem)
    assert caught.value.floor_bytes == least(refusals).floor_bytes


@pytest.mark.parametrize(
    ("ops", "steps"),
    [(0, 2000), (100, 2000), (500, 2000), (800, 1250), (4000, 1000), (14_000, 500), (28_000, 250)],
)
def test_shallow_and_deep_networks_get_about_as_many_steps(ops, steps):
    assert evaluations(1.0, ops) == steps


def test_a_start_is_not_asked_what_it_would_need(monkeypatch):
    """Finding that out would try the rule with more and more memory."""
    tried = []

    def count(policy, problem):
        tried.append(problem.budget_bytes)
        raise refusal

    refusal = InfeasibleError(
        tier="device", op="", budget_bytes=1, needed_bytes=1, floor_bytes=1 << 40, policy="rule"
    )
    monkeypatch.setattr(SuperNeurons, "plan_once", count)
    found = find_starts(chain(), 1)
    assert tried == [chain().budget_bytes]
    assert refusal not in found.refusals
