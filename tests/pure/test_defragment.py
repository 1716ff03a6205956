"""defragment: tensors find their place, by the seconds of a step and what it loses besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.allocators import Card, reserve
from outcore.allocators.best_fit import BestFit
from outcore.allocators.card import GIVEN_BACK_BYTES_PER_SECOND
from outcore.allocators.expandable import ExpandableSegments
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, peak
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.policies.defragment import Defragment
from outcore.policies.search import Search
from outcore.simulate import simulate
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import planned

GIB = 2**30

drawn = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def seconds(problem: Problem, plan: Plan, card: Card) -> float:
    """What a step takes, with what it loses to the allocator."""
    program = lower(problem, plan)
    return simulate(problem, program).seconds + card.lost_seconds(problem, program)


@drawn
@given(planned=planned(), room=st.integers(0, 64), seed=st.integers(0, 3))
def test_what_is_found_fits_and_takes_no_longer(planned, room, seed):
    problem, plan, before = planned
    taken = peak(problem, before, Tier.DEVICE).nbytes
    card = Card(taken + room * taken // 64, BestFit())
    fixed = frozenset(gap for gap, _ in plan.moves[::2])
    found = Defragment(plan, card, fixed, seed).plan(problem)
    assert fits(problem, lower(problem, found))
    assert seconds(problem, found, card) <= seconds(problem, plan, card)
    assert all(found.choice(gap) == plan.choice(gap) for gap in fixed)
    assert replace(found, choices=plan.choices) == plan
    assert found == Defragment(plan, card, fixed, seed).plan(problem)


def test_resnet_under_16_gib_loses_nothing_any_more():
    limit = 16 * GIB
    card = Card(limit, ExpandableSegments())
    problem = table3_problem(640, limit - limit // 8, 12e9)
    plan = Search(effort=0.2).plan(problem)
    found = Defragment(plan, card).plan(problem)
    assert card.lost_seconds(problem, lower(problem, plan)) > 0
    assert card.lost_seconds(problem, lower(problem, found)) == 0
    times = [simulate(problem, lower(problem, each)).seconds for each in (plan, found)]
    assert times[1] <= times[0] * 1.03
    assert found.policy == plan.policy


def test_a_plan_that_loses_nothing_stays():
    problem = table3_problem(640, 12 * GIB, 12e9)
    plan = Search(effort=0.05).plan(problem)
    assert Defragment(plan, Card(40 * GIB, ExpandableSegments())).plan(problem) is plan


@pytest.mark.parametrize(
    ("limit", "budget", "rooms"),
    [
        (16, 16, (1, 4 / 3, 2)),
        (16, 15.5, (0.5, 4 / 3 - 0.5, 1.5)),
        (16, 14.5, (0, 0.5)),
        (16, 12, (0,)),
        (2, 2, (0.25, 1 / 3, 0.5)),
        (0.5, 0.5, (0.125, 1 / 6, 0.25)),
    ],
)
def test_rooms_are_parts_of_the_card(limit, budget, rooms):
    card = Card(int(limit * GIB), BestFit())
    assert card.rooms(int(budget * GIB)) == tuple(int(room * GIB) for room in rooms)


def test_what_is_lost_is_what_later_steps_give_back():
    limit = 16 * GIB
    problem = table3_problem(640, limit - limit // 8, 12e9)
    program = lower(problem, Search(effort=0.2).plan(problem))
    card = Card(limit, ExpandableSegments())
    served = reserve(problem, program, card.allocator, capacity_bytes=limit, steps=6)
    assert served.given_back_bytes > GIB // 2
    lost = card.lost_seconds(problem, program)
    assert lost == served.given_back_bytes / GIVEN_BACK_BYTES_PER_SECOND
    endless = replace(card, limit_bytes=100 * GIB)
    assert endless.lost_seconds(problem, program) == 0
