"""Plans that leave room for a GPU's allocator: how often and until when a policy is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outcore.allocators import Space
from outcore.errors import InfeasibleError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies import infeasible
from outcore.policies.floor import floor
from outcore.policies.swap_all import SwapAll
from outcore.runtime import headroom
from outcore.runtime.headroom import once, with_places
from tests.pure.building import dense_problem

BUDGET = 1 << 30
ROOMS = (1 << 20, 3 << 20)


class Policy:
    """Swaps all; records the budgets that it is called with."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def __call__(self, problem: Problem) -> Plan:
        self.budgets.append(problem.budget_bytes)
        if problem.budget_bytes < BUDGET - ROOMS[-1]:
            raise infeasible(problem, floor(problem))
        return SwapAll().plan(problem)


@pytest.fixture
def problem() -> Problem:
    return dense_problem(budget_bytes=BUDGET)


def test_a_policy_is_asked_once_for_each_problem(problem: Problem) -> None:
    policy = Policy()
    make = once(policy)
    other = replace(problem, budget_bytes=BUDGET - 1)
    plans = [make(each) for each in (problem, other, replace(problem), other)]
    assert plans[0] == plans[2]
    assert policy.budgets == [BUDGET, BUDGET - 1]


def test_that_there_is_no_plan_is_found_each_time(problem: Problem) -> None:
    """Errors are not remembered: a kept error would hold all that its frames hold."""
    policy = Policy()
    make = once(policy)
    for _ in range(2):
        with pytest.raises(InfeasibleError):
            make(replace(problem, budget_bytes=1))
    assert policy.budgets == [1, 1]


@pytest.mark.parametrize(
    ("lacking", "asked", "tried"),
    [
        (0, [1, 2, 3], 3),
        (1, [1, 2, 3], 0),
        (1 << 20, [1, 2, 3], 2),
        ((2 << 20) + 1, [1], 0),
    ],
)
def test_where_too_much_is_lacking_there_is_no_further_plan(
    lacking: int, asked: list[int], tried: int, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops if the largest room cannot give what is lacking.

    A layout is sought only if nothing is lacking.
    """
    policy, laid = Policy(), []
    first = BUDGET - ROOMS[0]

    def lacks(roomier: Problem, *_: Any) -> int:
        return lacking - (first - roomier.budget_bytes) if lacking > 1 else lacking

    monkeypatch.setattr(headroom, "lacking_bytes", lacks)
    monkeypatch.setattr(headroom, "place_out_of_process", lambda *_: laid.append(1))
    assert with_places(problem, ROOMS, policy, Space(BUDGET)) is None
    assert policy.budgets == [BUDGET - (each << 20) for each in asked]
    assert len(laid) == tried
