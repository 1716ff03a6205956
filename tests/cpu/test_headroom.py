"""Plans that leave room for a GPU's allocator: how often and until when a policy is called."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.layout import Layout
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.out_of_process import Tried
from outcore.policies import infeasible
from outcore.policies.floor import floor
from outcore.policies.pooch.swap_all import SwapAll
from outcore.runtime.planning.headroom import Remembering, with_places
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
    make = Remembering(policy)
    other, known = (replace(problem, budget_bytes=BUDGET - less) for less in (1, 2))
    make.remember(known, make(problem))
    plans = [make(each) for each in (problem, other, replace(problem), other, known)]
    assert plans[0] == plans[2] == plans[4]
    assert policy.budgets == [BUDGET, BUDGET - 1]


def test_that_there_is_no_plan_is_found_each_time(problem: Problem) -> None:
    """Errors are not remembered: a kept error would hold all that its frames hold."""
    policy = Policy()
    make = Remembering(policy)
    for _ in range(2):
        with pytest.raises(InfeasibleError):
            make(replace(problem, budget_bytes=1))
    assert policy.budgets == [1, 1]


@pytest.mark.parametrize(
    ("lacking", "asked"),
    [(0, [1, 2, 3]), (1, [1, 2, 3]), (1 << 20, [1, 2, 3]), ((2 << 20) + 1, [1])],
)
def test_where_too_much_is_lacking_there_is_no_further_plan(
    lacking: int, asked: list[int], problem: Problem
) -> None:
    """It stops if the largest room cannot give what is lacking. The plans are remembered."""
    policy, first = Policy(), BUDGET - ROOMS[0]

    def place(problems: Sequence[Problem]) -> Generator[Tried, None, None]:
        for each in problems:
            lacks = lacking - (first - each.budget_bytes) if lacking > 1 else lacking
            yield Tried(policy(each), lacks, None)

    make = Remembering(policy)
    assert with_places(problem, ROOMS, place, make) is None
    assert policy.budgets == [BUDGET - (each << 20) for each in asked]
    for each in asked:
        make(replace(problem, budget_bytes=BUDGET - (each << 20)))
    assert len(policy.budgets) == len(asked)


def test_the_first_layout_is_taken(problem: Problem) -> None:
    """The others are then given up."""
    policy, closed = Policy(), []
    layout = Layout(0, {}, {}, {}, frozenset(), frozenset(), 0)

    def place(problems: Sequence[Problem]) -> Generator[Tried, None, None]:
        try:
            for number, each in enumerate(problems):
                yield Tried(policy(each), 0, layout if number else None)
        finally:
            closed.append(True)

    given: list[Generator[Tried, None, None]] = []

    def noted(problems: Sequence[Problem]) -> Generator[Tried, None, None]:
        given.append(place(problems))
        return given[-1]

    found = with_places(problem, ROOMS, noted, Remembering(policy))
    assert found is not None
    assert found.layout is layout
    assert found.problem.budget_bytes == BUDGET - (2 << 20)
    assert policy.budgets == [BUDGET - (1 << 20), BUDGET - (2 << 20)]
    assert closed


def test_no_plan_is_no_layout(problem: Problem) -> None:
    def place(_: Sequence[Problem]) -> Generator[Tried, None, None]:
        yield from ()

    assert with_places(problem, ROOMS, place, Remembering(Policy())) is None
