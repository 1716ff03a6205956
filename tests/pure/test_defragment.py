"""defragment: plans that lose less time to fragmentation, and the card model that says how much."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.allocators import Card, Held, reserve
from outcore.allocators.best_fit import BestFit
from outcore.allocators.card import GIVEN_BACK_BYTES_PER_SECOND
from outcore.allocators.expandable import ExpandableSegments
from outcore.ir.memory import fits
from outcore.ir.plan import Choice, Offload, Plan, default_choice
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.verify_plan import verify_plan
from outcore.lower import lower
from outcore.policies.pooch.pooch import Pooch
from outcore.policies.pooch.swap_opt import SwapOpt
from outcore.policies.search.defragment import Defragment
from outcore.simulate import simulate
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import planned

GIB = 2**30

drawn = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])


class Whimsical(Card):
    """A card whose lost seconds are a hash of the program, or zero."""

    def lost_seconds(self, problem: Problem, program: Program, most_seconds: float = inf) -> float:
        found = crc32(repr(program.body).encode()) / 2**32
        return found * sum(problem.profile.seconds) if found > NOTHING else 0.0


NOTHING = 0.02


def seconds(problem: Problem, plan: Plan, card: Card) -> float:
    """The seconds of a step, including those that it loses to the allocator."""
    program = lower(problem, plan)
    return simulate(problem, program).seconds + card.lost_seconds(problem, program)


@drawn
@given(planned=planned(), seed=st.integers(0, 3), few=st.booleans())
def test_what_is_found_fits_and_takes_no_longer(planned, seed, few):
    problem, plan, _ = planned
    card = Whimsical(1, BestFit())
    fixed = frozenset(gap for gap, _ in plan.moves[:: 2 if few else 1])
    found = Defragment(plan, card, fixed, seed).plan(problem)
    verify_plan(problem, found)
    assert fits(problem, lower(problem, found))
    assert seconds(problem, found, card) <= seconds(problem, plan, card)
    assert all(found.choice(gap) == plan.choice(gap) for gap in fixed)
    assert replace(found, choices=plan.choices) == plan
    assert found == Defragment(plan, card, fixed, seed).plan(problem)
    if not few:
        assert found is plan


def test_moves_are_at_other_times_or_none():
    problem = table3_problem(640, 14 * GIB, 12e9)
    plan = SwapOpt(early=True).plan(problem)
    card = Whimsical(1, BestFit())
    found = Defragment(plan, card).plan(problem)
    assert seconds(problem, found, card) < seconds(problem, plan, card)
    changed = [(gap, choice) for gap, choice in plan.choices if found.choice(gap) != choice]
    assert changed
    for gap, choice in changed:
        assert _hintless(found.choice(gap)) in (default_choice(gap), _hintless(choice))


def _hintless(choice: Choice) -> Choice:
    if not isinstance(choice, Offload):
        return choice
    return replace(choice, release=None, prefetch=None)


def lossy() -> tuple[Card, Problem, Plan]:
    """A plan that loses time to the allocator, on a card with little more than the budget."""
    card = Card(31 * GIB // 2, ExpandableSegments(fraction=True))
    problem = table3_problem(640, 14 * GIB, 12e9)
    plan = Pooch(early=True).plan(problem)
    assert card.lost_seconds(problem, lower(problem, plan)) > 0
    return card, problem, plan


def test_resnet_loses_less():
    card, problem, plan = lossy()
    found = Defragment(plan, card).plan(problem)
    lost = [card.lost_seconds(problem, lower(problem, each)) for each in (plan, found)]
    assert lost[1] <= lost[0] / 2
    times = [simulate(problem, lower(problem, each)).seconds for each in (plan, found)]
    assert times[1] <= times[0] * 1.03
    assert found.policy == plan.policy


def test_a_plan_that_loses_nothing_stays():
    card, problem, plan = lossy()
    endless = replace(card, limit_bytes=40 * GIB)
    assert endless.lost_seconds(problem, lower(problem, plan)) == 0
    assert Defragment(plan, endless).plan(problem) is plan


@pytest.mark.parametrize(
    ("limit", "budget", "rooms"),
    [
        (16, 16, (1, 2)),
        (16, 15.5, (0.5, 1.5)),
        (16, 14.5, (0, 0.5)),
        (16, 12, (0,)),
        (2, 2, (0.25, 0.5)),
        (0.5, 0.5, (0.125, 0.25)),
    ],
)
def test_rooms_are_parts_of_the_card(limit, budget, rooms):
    card = Card(int(limit * GIB), BestFit())
    assert card.rooms(int(budget * GIB)) == tuple(int(room * GIB) for room in rooms)


def test_what_is_lost_is_what_later_steps_give_back():
    card, problem, plan = lossy()
    program = lower(problem, plan)
    served = reserve(problem, program, card.allocator, capacity_bytes=card.limit_bytes, steps=4)
    assert served.given_back_bytes > GIB // 2
    undisturbed = served.given_back_bytes / GIVEN_BACK_BYTES_PER_SECOND
    lost = card.lost_seconds(problem, program)
    assert 0.5 < lost / undisturbed < 2
    assert card.lost_seconds(problem, program, undisturbed / 8) == pytest.approx(undisturbed / 4)
    held = replace(card, held=Held(external_bytes=4 * GIB))
    assert held.lost_seconds(problem, program) > lost
