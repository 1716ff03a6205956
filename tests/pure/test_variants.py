"""Variants of ops, from profile to timeline: other seconds and workspaces, the same meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.allocators import reserve
from outcore.errors import InfeasibleError, VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.memory import held_bytes, peak
from outcore.ir.plan import Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost
from outcore.ir.program import Free, Program, Run
from outcore.ir.text import parse, to_text
from outcore.lower import lower
from outcore.policies.floor import floor, floor_plan, plan_floor
from outcore.policies.settle import settle
from outcore.simulate import simulate
from tests.pure.strategies import plans, problems, small_problem

# Every op takes 1 ms and 128 B by default.
FAST, SLOW = Cost(0.25e-3, 5000), Cost(2e-3, 0)
RERUN = "gap 4 after 2 before 7 recompute\ngap 5 after 3 before 6 recompute"


def problem(alternatives: Mapping[int, tuple[Cost, ...]], budget_bytes: int = 1 << 20) -> Problem:
    """`small_problem` with alternatives."""
    plain = small_problem(budget_bytes)
    found = tuple(sorted(alternatives.items()))
    return replace(plain, profile=replace(plain.profile, alternatives=found))


def plan_of(*lines: str) -> Plan:
    return parse("\n".join(("plan", *lines)), Plan)


def runs(program: Program) -> list[tuple[int, Run]]:
    body = enumerate(program.body)
    return [(position, x.action) for position, x in body if isinstance(x.action, Run)]


def test_costs_of_an_op() -> None:
    profile = problem({2: (FAST, SLOW)}).profile
    assert profile.costs[2] == (Cost(1e-3, 128), FAST, SLOW)
    assert [profile.cost(2, variant) for variant in range(3)] == list(profile.costs[2])
    assert profile.cost(2) == profile.cost(3) == Cost(1e-3, 128)


def test_a_plan_lists_the_variants_that_are_not_the_default() -> None:
    plan = make_plan({}, variants={7: 1, 2: 0, 3: 2})
    assert plan.variants == ((3, 2), (7, 1))
    assert [plan.variant(op) for op in (2, 3, 7)] == [0, 2, 1]


def test_all_runs_of_an_op_use_the_variant_of_the_plan(golden) -> None:
    """Op 2 runs twice; the peak moves to where its workspace is."""
    given_problem, plan = problem({2: (FAST, SLOW)}), plan_of(RERUN, "op 2 variant 1")
    program = lower(given_problem, plan)
    found = [(run.op, run.again, run.variant) for _, run in runs(program)]
    assert [(again, variant) for op, again, variant in found if op == 2] == [(False, 1), (True, 1)]
    assert {variant for op, _, variant in found if op != 2} == {0}
    golden(f"{to_text(plan)}\n{to_text(program)}", "lower/variants")


@pytest.mark.parametrize(("variant", "cost"), [(0, Cost(1e-3, 128)), (1, FAST), (2, SLOW)])
def test_time_and_memory_are_those_of_the_variant(variant: int, cost: Cost) -> None:
    given_problem = problem({2: (FAST, SLOW)})
    plain, program = (
        lower(given_problem, plan_of(RERUN, *lines))
        for lines in ((), (f"op 2 variant {variant}",) if variant else ())
    )
    before, after = (held_bytes(given_problem, p, Tier.DEVICE) for p in (plain, program))
    at = {position for position, run in runs(program) if run.op == 2}
    more = cost.workspace_bytes - 128
    assert after == tuple(n + more * (i in at) for i, n in enumerate(before))
    timeline = simulate(given_problem, program)
    assert timeline.seconds == pytest.approx((len(runs(program)) - 2) * 1e-3 + 2 * cost.seconds)
    assert timeline.peak(Tier.DEVICE) == max(after)
    assert reserve(given_problem, program, "ideal", steps=1).reserved.nbytes == max(after)


def test_the_clock_of_lowering_goes_by_the_variant() -> None:
    """After op 3, `conv` takes 1.1 ms to leave: during ops 4 and 5, or during a slow op 4 alone."""
    given_problem, gap = problem({4: (SLOW,)}), "gap 3 after 3 before 8 offload host"
    freed = []
    for lines in ((gap,), (gap, "op 4 variant 1")):
        program = lower(given_problem, plan_of(*lines))
        starts = {run.op: position for position, run in runs(program)}
        read = program.body[starts[3]].action
        assert isinstance(read, Run)
        (slot,) = (s for s in read.reads if program.slots[s].buffer == 3)
        at = next(i for i, x in enumerate(program.body) if x.action == Free(slot))
        freed.append(next(op for op in range(9) if starts[op] > at))
    assert freed == [6, 5]


def test_a_copy_back_waits_for_the_workspace_of_a_variant() -> None:
    """There is room for `conv` at every op, except at op 6 with the workspace of its variant."""
    gap = "gap 3 after 3 before 8 offload host prefetch 5"
    alone, beside = (gap,), (gap, "op 6 variant 1")
    roomy = problem({6: (FAST,)})
    least = plan_floor(roomy, plan_of(*beside)).nbytes
    tight = replace(roomy, budget_bytes=least)
    fetched = []
    for lines in (alone, beside):
        program = lower(tight, plan_of(*lines))
        assert peak(tight, program, Tier.DEVICE).nbytes <= least
        starts = {run.op: position for position, run in runs(program)}
        back = next(i for i, x in enumerate(program.body) if x.stream.value == "in")
        fetched.append(next(op for op in range(9) if starts[op] > back))
    assert fetched == [5, 7]


@given(st.data())
def test_variants_change_nothing_but_costs(data: st.DataObject) -> None:
    """With everything kept."""
    drawn = data.draw(problems())
    plan = data.draw(plans(drawn))
    keep = replace(plan, choices=())
    program, plain = (lower(drawn, each) for each in (keep, make_plan({})))
    default = tuple(
        replace(x, action=replace(x.action, variant=0)) if isinstance(x.action, Run) else x
        for x in program.body
    )
    assert default == plain.body
    chosen = [drawn.profile.cost(run.op, plan.variant(run.op)) for _, run in runs(plain)]
    assert simulate(drawn, program).seconds == pytest.approx(sum(c.seconds for c in chosen))


# ---- policies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fastest:
    """Keeps everything, and runs each op by its fastest variant."""

    name: ClassVar[str] = "fastest"
    summary: ClassVar[str] = "for tests"

    def plan(self, problem: Problem) -> Plan:
        """Keep everything; choose the fastest variant of each op."""
        seconds = ([cost.seconds for cost in costs] for costs in problem.profile.costs)
        return settle(problem, {}, self, {op: s.index(min(s)) for op, s in enumerate(seconds)})


def test_settle_goes_by_the_variants() -> None:
    roomy = problem({2: (FAST, SLOW)})
    least = plan_floor(roomy, make_plan({}, variants={2: 1}))
    assert least.nbytes > plan_floor(roomy, make_plan({})).nbytes
    assert least.op.startswith("op 2 ")
    plan = Fastest().plan(replace(roomy, budget_bytes=least.nbytes))
    assert plan.variants == ((2, 1),)
    with pytest.raises(InfeasibleError) as caught:
        Fastest().plan(replace(roomy, budget_bytes=least.nbytes - 1))
    assert caught.value.floor_bytes == least.nbytes


def test_the_floor_takes_the_smallest_workspace_of_each_op() -> None:
    plain = floor(small_problem())
    everywhere = problem({op: (FAST, Cost(5e-3, 8)) for op in range(9)})
    assert floor(everywhere).nbytes == plain.nbytes - 120
    plan = floor_plan(replace(everywhere, budget_bytes=plain.nbytes - 120))
    assert plan.variants == tuple((op, 2) for op in range(9))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "where", "rule", "detail"),
    [
        ("op 9 variant 1", "op 9", "an alternative that the profile has", "there are 0"),
        ("op -1 variant 1", "op -1", "an alternative that the profile has", "there are 0"),
        ("op 3 variant 1", "op 3", "an alternative that the profile has", "there are 0"),
        ("op 2 variant 3", "op 2", "an alternative that the profile has", "this is variant 3"),
        ("op 2 variant 0", "op 2", "an alternative that the profile has", "this is variant 0"),
        ("op 2 variant -1", "op 2", "an alternative that the profile has", "this is variant -1"),
        ("op 4 variant 1\nop 2 variant 1", "op 2", "sorted by op", "it comes after op 4"),
        ("op 2 variant 1\nop 2 variant 2", "op 2", "sorted by op", "it comes after op 2"),
    ],
)
def test_each_rule_of_a_plans_variants(lines: str, where: str, rule: str, detail: str) -> None:
    with pytest.raises(VerifyError) as caught:
        lower(problem({2: (FAST, SLOW), 4: (FAST,)}), plan_of(lines))
    error = caught.value
    assert (error.noun, error.where) == ("plan", where)
    assert rule in error.rule
    assert detail in error.detail
