"""Collectives: under every plan each runs once, in the order of the trace."""

from dataclasses import replace

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.plan import Recompute
from outcore.ir.program import Run
from outcore.ir.trace import Effect
from outcore.lower import lower
from outcore.policies import floor, resolve
from outcore.policies.candidates import candidates, recomputable
from tests.pure.building import small_problem
from tests.pure.test_policies import SPECS

TALKS = (1, 2)
"""Ops of the small trace made collectives here; backward reads the buffer that each makes."""


def talking(budget_bytes):
    problem = small_problem(budget_bytes)
    ops = [
        replace(op, effects=frozenset({Effect.COLLECTIVE})) if op.id in TALKS else op
        for op in problem.trace.ops
    ]
    return replace(problem, trace=replace(problem.trace, ops=tuple(ops)))


@pytest.mark.parametrize("spec", SPECS)
def test_no_policy_runs_one_again(spec):
    policy, least = resolve(spec), floor(talking(16384)).nbytes
    for budget in (least, 2 * least, 16384):
        problem = talking(budget)
        try:
            plan = policy.plan(problem)
        except InfeasibleError as error:
            plan = policy.plan(problem := talking(error.floor_bytes))
        made = {b for op in TALKS for b in problem.trace.writes[op]}
        again = {gap.buffer for gap, choice in plan.choices if isinstance(choice, Recompute)}
        assert not made & again
        body = lower(problem, plan).body
        runs = [x.action.op for x in body if isinstance(x.action, Run)]
        assert [op for op in runs if op in TALKS] == list(TALKS)


def test_what_one_made_cannot_be_made_again_but_what_follows_it_can():
    problem = talking(8192)
    able = {gap.buffer for gap in recomputable(problem, candidates(problem, 1))}
    names = {problem.trace.buffers[buffer].name for buffer in able}
    assert names.isdisjoint({"dropped", "curved"})
    assert "mixed" in names
