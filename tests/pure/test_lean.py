"""lean_plans: plans of little memory, and the floors that they make, with limited outer tiers."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, tier_bytes
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Run
from outcore.ir.trace import Effect
from outcore.lower import lower, lower_without_overlap
from outcore.policies import floor, floor_plan, lean_plans, reruns
from tests.pure.strategies import problems
from tests.pure.test_policies import KIB, chain

drawn = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


parts = st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.99])
"""How much of the bytes of all buffers an outer tier has room for."""


def beside(problem: Problem, part: float) -> Problem:
    """The problem with room in the outer tiers for `part` of all buffers."""
    room = int(part * sum(buffer.nbytes for buffer in problem.trace.buffers))
    return replace(problem, host_budget_bytes=room, disk_budget_bytes=room)


def test_small_maps_are_recomputed_beside_a_host_with_room_for_most():
    """All of them are below the size that is offloaded first, and nothing does not fit."""
    problem = replace(chain((1,) * 50), budget_bytes=45 * KIB + 64 * KIB)
    for host in (0, 49 * KIB):
        limited = replace(problem, host_budget_bytes=host)
        assert fits(limited, lower(limited, floor_plan(limited)))


def test_what_there_is_room_for_is_offloaded_if_nothing_can_be_recomputed():
    problem = chain(effects={i: [Effect.UNREPEATABLE] for i in range(4)})
    one = replace(problem, host_budget_bytes=64 * KIB)
    assert floor(one).nbytes == floor(replace(problem, host_budget_bytes=0)).nbytes - 64 * KIB
    plan = floor_plan(replace(one, budget_bytes=floor(one).nbytes))
    assert [gap.buffer for gap, _ in plan.choices] == [1], "it waits the longest"


def reruns_per_op(problem: Problem, plan: Plan) -> float:
    actions = [each.action for each in lower(problem, plan, fast=True).body]
    return sum(isinstance(x, Run) and x.again for x in actions) / len(problem.trace.ops)


def test_a_deep_network_is_profiled_with_few_reruns():
    problem = replace(chain((1,) * 1000), host_budget_bytes=0)
    for budget, most in ((200 * KIB, 1), (110 * KIB, 20)):
        tight = replace(problem, budget_bytes=budget)
        assert reruns_per_op(tight, floor_plan(tight)) < most


def test_a_network_that_is_not_so_deep_has_no_limit_at_the_floor():
    problem = replace(chain((1,) * 100), host_budget_bytes=0)
    lowest = floor(problem).nbytes
    assert lowest == floor(replace(chain((1,) * 10), host_budget_bytes=0)).nbytes
    tight = replace(problem, budget_bytes=lowest)
    assert reruns_per_op(tight, floor_plan(tight)) > 20


def test_no_lean_plan_of_a_deep_network_runs_its_ops_without_end(monkeypatch):
    problem = replace(chain((1,) * 100), host_budget_bytes=0)
    monkeypatch.setattr(reruns, "MOST_AGAIN", 1000)
    assert all(reruns_per_op(problem, plan) < 10 for plan in lean_plans(problem))


@drawn
@given(problem=problems(), part=parts)
def test_lean_plans_are_inside_the_outer_tiers_limits(problem, part):
    problem = beside(problem, part)
    for plan in lean_plans(problem):
        program = lower_without_overlap(problem, plan)
        for tier in (Tier.HOST, Tier.DISK):
            assert tier_bytes(problem, program, tier) <= problem.limit_bytes(tier)


@drawn
@given(problem=problems(), room=st.tuples(parts, parts))
def test_the_floor_never_rises_with_room_outside(problem, room):
    # Without padding and donations: with them, what is offloaded may need more than what is kept
    # or recomputed (`test_no_plan_needs_less_than_the_floor`).
    hardware = replace(problem.hardware, fetch_padding_bytes=0)
    plain = replace(problem, trace=replace(problem.trace, donations=()), hardware=hardware)
    less, more = (floor(beside(plain, part)).nbytes for part in sorted(room))
    assert more <= less
