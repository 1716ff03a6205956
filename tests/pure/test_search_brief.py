"""brief: the gaps that `search` leaves out, and that nothing is lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError
from outcore.evaluate import OFFLOAD, Evaluator
from outcore.ir.hardware import Link
from outcore.ir.liveness import gaps
from outcore.ir.plan import KEEP, Offload, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.trace import Donation, Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import floor
from outcore.policies.floor import floor_plan
from outcore.policies.search import brief as search_brief
from outcore.policies.search.brief import begin, brief
from outcore.policies.search.fixed import search_fixed
from outcore.policies.search.search import Search
from outcore.policies.search.space import make_space
from outcore.policies.search.starts import find_starts
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, dense_problem, relinked
from tests.pure.strategies import plans, problems
from tests.pure.test_policies import chain, problem_of

drawn = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
KIB = 1024
COPY = 1.75e-3
"""Seconds that 64 KiB take over the link of `slow`."""
TIGHT, LARGE = 1 << 18, 1 << 20
"""A budget, and a workspace."""


@pytest.fixture(autouse=True, scope="module")
def few_are_enough() -> Iterator[None]:
    """Leave brief gaps out of small problems too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_brief, "FEW", 0)
        yield


def slow(problem: Problem) -> Problem:
    return relinked(problem, lambda *_: Link(64 * KIB / COPY))


def left_out(problem: Problem) -> set[tuple[int, int, int]]:
    """The buffer and the ends of each brief gap."""
    space = make_space(problem, Evaluator(problem), 1)
    found = (space.gaps[index] for index in brief(problem, space))
    return {(gap.buffer, gap.after, gap.before) for gap in found}


def with_workspace(problem: Problem, op: int, nbytes: int) -> Problem:
    workspaces = list(problem.profile.workspace_bytes)
    workspaces[op] = nbytes
    return replace(problem, profile=replace(problem.profile, workspace_bytes=tuple(workspaces)))


def test_what_is_over_before_a_copy_could_be_back_is_brief():
    """Buffers 5 and 6 are idle for 2 and 0 ms, buffer 4 for 4 ms; out and back take 3.5 ms."""
    problem = slow(chain((64,) * 6))
    assert left_out(problem) == {(5, 5, 8), (6, 6, 7)}


def test_what_cannot_leave_is_never_brief():
    problem = slow(chain((64,) * 6))
    assert left_out(replace(problem, host_budget_bytes=0)) == set()


def test_few_gaps_are_all_decided_on(monkeypatch):
    problem = slow(chain((64,) * 6))
    monkeypatch.setattr(search_brief, "FEW", 6)
    assert left_out(problem) == set()


@pytest.mark.parametrize(
    ("op", "budget_bytes", "expected"),
    [
        (5, 2 * LARGE, True),  # the buffer has to be there then
        (8, 2 * LARGE, True),
        (6, 2 * LARGE, False),
        (7, 2 * LARGE, False),
        (6, 1 << 30, True),  # there is room for all of it
        (5, LARGE, False),  # with all brief gaps kept, no plan has room for it
    ],
)
def test_where_more_is_held_inside_than_at_the_ends_it_is_not(op, budget_bytes, expected):
    problem = with_workspace(slow(chain((64,) * 6)), op, LARGE)
    assert ((5, 5, 8) in left_out(replace(problem, budget_bytes=budget_bytes))) is expected


def test_the_pause_between_the_calls_is_inside():
    problem = replace(slow(chain((64,) * 6)), budget_bytes=2 * LARGE, between_bytes=LARGE)
    assert left_out(problem) == set()


def overwritten(*, donates: bool) -> Problem:
    """Op 1 reads buffer 1 and makes one of the same size; op 3 reads buffer 1 again."""
    t = TraceBuilder()
    x = t.new(256, Role.INPUT, borrowed=True, name="x")
    first, second = (t.new(64 * 256, Role.ACTIVATION) for _ in range(2))
    small, out = (t.new(256, Role.ACTIVATION) for _ in range(2))
    t.op("test.f", (Ref(x),), (first,))
    op = t.op("test.g", (Ref(first),), (second,))
    if donates:
        t.donations.append(Donation(op, first, second))
    t.op("test.h", (Ref(second),), (small,))
    t.op("test.f", (Ref(small), Ref(first)), (out,))
    tangent, gradient = (t.new(256, Role.GRAD) for _ in range(2))
    t.op("test.b", (Ref(tangent),), (gradient,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(gradient),))
    return slow(with_workspace(problem_of(trace, TIGHT), 3, 16 * KIB))


@pytest.mark.parametrize("donates", [False, True])
def test_an_op_that_could_write_over_the_buffer_is_inside(donates):
    """If it cannot, it holds both buffers, and the next op holds no more than that."""
    workspace = with_workspace(overwritten(donates=donates), 1, 4 * KIB)
    assert ((1, 1, 3) in left_out(workspace)) is not donates


def test_what_is_dead_is_never_brief():
    problem = relinked(dense_problem(4, 1 << 20), lambda *_: Link(1.0))
    space = make_space(problem, Evaluator(problem), 1)
    found = [space.gaps[index] for index in brief(problem, space)]
    assert found
    assert not any(gap.dead for gap in found)
    assert any(space.gaps[index].dead for index in space.allowed)


def test_gaps_where_the_best_start_needs_a_choice_are_decided_on(monkeypatch):
    """At the floor, no plan fits with all these gaps at their default."""
    problem = chain((512, 64) * 6)
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    evaluator = Evaluator(tight)
    space = make_space(tight, evaluator, 1)
    kinds = space.kinds(floor_plan(tight))
    monkeypatch.setattr(search_brief, "brief", lambda _, space: frozenset(space.allowed))
    found = begin(evaluator, space, [kinds], 0)
    assert found.found
    assert list(found.space.allowed) == [i for i in space.allowed if kinds[i] == OFFLOAD]
    assert found.best.kinds.tolist() == kinds.tolist()


def test_a_choice_that_costs_and_is_not_needed_is_dropped_from_a_start(monkeypatch):
    problem = chain((64,) * 6)
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, 1)
    again = make_plan(dict.fromkeys(space.gaps, Recompute()))
    monkeypatch.setattr(search_brief, "brief", lambda _, space: frozenset(space.allowed))
    found = begin(evaluator, space, [space.kinds(again)], 0)
    assert found.space.allowed == {}
    assert found.best.kinds.tolist() == space.default_kinds.tolist()


@drawn
@given(problem=problems(), data=st.data())
def test_it_begins_no_later_than_at_any_start(problem, data):
    evaluator = Evaluator(problem)
    space = make_space(problem, evaluator, 1)
    starts = [space.kinds(data.draw(plans(problem))) for _ in range(3)]
    judged = [evaluator.evaluate(kinds) for kinds in starts]
    found = begin(evaluator, space, starts, 0)
    assert found.best.seconds <= min((j.seconds for j in judged if j.fits), default=np.inf)
    assert set(found.space.allowed) | brief(problem, space) == set(space.allowed)
    for index in set(space.allowed) - set(found.space.allowed):
        assert found.best.kinds[index] == space.default_kinds[index]


@drawn
@given(problem=problems())
def test_with_little_memory_it_is_still_never_slower_than_what_it_starts_from(problem):
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    starts = find_starts(tight, 1)
    assume(starts.plans)
    known = [simulate(tight, lower(tight, plan)).seconds for plan in starts.plans]
    found = Search(min_bytes=1, effort=0.001).plan(tight)
    assert simulate(tight, lower(tight, found)).seconds <= min(known)


@drawn
@given(problem=problems(), data=st.data())
def test_what_is_fixed_stays_so_in_brief_gaps_too(problem, data):
    choices = st.sampled_from([KEEP, Offload(problem.hardware.outer)])
    fixed = {gap: data.draw(choices) for gap in gaps(problem.trace)[:3]}
    try:
        found = search_fixed(problem, Search(min_bytes=1, effort=0.001), fixed)
    except InfeasibleError:
        return
    assert all(type(found.choice(gap)) is type(choice) for gap, choice in fixed.items())
