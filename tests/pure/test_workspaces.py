"""workspaces: the variants that policies choose, by one rule or by the memory that is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outcore.errors import InfeasibleError, VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, held_bytes
from outcore.ir.plan import Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Run
from outcore.lower import lower
from outcore.policies import parse_policy, resolve
from outcore.policies.floor import plan_floor
from outcore.policies.keep_all import KeepAll
from outcore.policies.settle import settle
from outcore.policies.vdnn.vdnn_all import VdnnAll
from outcore.policies.vdnn.vdnn_conv import VdnnConv
from outcore.policies.vdnn.vdnn_dyn import VdnnDyn
from outcore.policies.workspaces import Algorithms, settle_in_room, variants_of
from tests.pure.strategies import plans, problems
from tests.pure.test_policies import drawn
from tests.pure.test_superneurons_cost_aware import towers
from tests.pure.test_variants import RERUN, plan_of
from tests.pure.test_variants import problem as small
from tests.pure.test_vdnn import KB, chosen, network

ENOUGH = 1 << 40


def with_alternatives(problem: Problem, alternatives: dict[int, tuple[Cost, ...]]) -> Problem:
    found = tuple(sorted(alternatives.items()))
    return replace(problem, profile=replace(problem.profile, alternatives=found))


def least(problem: Problem, plan: Plan) -> int:
    return plan_floor(problem, plan).nbytes


# ---- one rule for all ---------------------------------------------------------------------------


def test_one_rule_for_all_ops():
    default = (2e-3, 2e-3, 1e-3), (8, 8, 8)
    others = (
        (0, (Cost(1e-3, 16), Cost(1e-3, 12))),  # two are the fastest: the leaner
        (2, (Cost(3e-3, 8), Cost(0.5e-3, 8))),  # all are as lean: the fastest
    )
    profile = Profile(*default, Source.ESTIMATED, others)
    assert variants_of(profile, Algorithms.PERFORMANCE) == {0: 2, 2: 2}
    assert variants_of(profile, Algorithms.MEMORY) == {0: 0, 2: 2}


@pytest.mark.parametrize("name", ["vdnn-all", "vdnn-conv"])
def test_vdnn_with_the_fastest_and_with_the_leanest(name):
    problem = with_alternatives(network(), {3: (Cost(1e-4, 5000), Cost(2e-3, 0))})
    problem = replace(
        problem, profile=replace(problem.profile, workspace_bytes=(0, 0, 0, 64) + 13 * (0,))
    )
    plain, fast, lean = (
        resolve(f"{name}{options}").plan(problem)
        for options in ("", "{algorithms=performance}", "{algorithms=memory}")
    )
    assert fast.variants == ((3, 1),)
    assert lean.variants == ((3, 2),)
    assert plain == lean
    assert fast.choices == lean.choices


# ---- what there is room for ---------------------------------------------------------------------


def test_the_fastest_that_fits_to_the_byte():
    """Everything is kept: the room of op 2 does not depend on what other ops hold."""
    quick, quicker = Cost(0.5e-3, 3000), Cost(0.25e-3, 9000)
    problem = small({2: (quicker, quick)})
    for variant in (1, 2):
        budget = least(problem, make_plan({}, variants={2: variant}))
        for short, expected in ((0, variant), (1, variant + 1)):
            tight = replace(problem, budget_bytes=budget - short)
            found = settle_in_room(tight, {}, KeepAll()).variant(2)
            assert found == expected % 3, "from the fastest to the next, and to the default"


def test_an_op_that_runs_again_goes_by_the_least_room_of_its_runs():
    """Op 2 runs again for op 6, when more is held than the first time."""
    choices = plan_of(RERUN).by_gap
    problem = small({2: (Cost(0.25e-3, 5000),)})
    program = lower(problem, plan_of(RERUN))
    held = held_bytes(problem, program, Tier.DEVICE)
    first, again = (
        held[position] - 128
        for position, each in enumerate(program.body)
        if isinstance(each.action, Run) and each.action.op == 2
    )
    assert first < again
    enough = replace(problem, budget_bytes=again + 5000)
    assert settle_in_room(enough, choices, KeepAll()).variants == ((2, 1),)
    tight = replace(problem, budget_bytes=first + 5000)
    assert settle_in_room(tight, choices, KeepAll()).variants == ()


def test_what_waits_between_the_calls_takes_no_room_from_the_first_backward():
    problem = small({5: (Cost(1e-4, 5000),)})
    budget = least(problem, make_plan({}, variants={5: 1}))
    lean = least(problem, make_plan({}))
    paused = replace(problem, budget_bytes=budget)
    most = max(
        n
        for n in range(0, 8000, 50)
        if least(replace(paused, between_bytes=n), make_plan({})) <= budget
    )
    assert most > budget - lean - 5000
    paused = replace(paused, between_bytes=most)
    assert settle_in_room(paused, {}, KeepAll()).variants == ((5, 1),)


@drawn
@given(data=st.data())
def test_each_op_is_the_fastest_that_the_leanest_program_leaves_room_for(data):
    problem = data.draw(problems())
    choices = data.draw(plans(replace(problem, budget_bytes=ENOUGH))).by_gap
    lean = make_plan(dict(choices), variants=variants_of(problem.profile, Algorithms.MEMORY))
    slack = data.draw(st.sampled_from([0, 64, 1000, 5000, ENOUGH]))
    try:
        budget_bytes = least(problem, lean) + slack
    except VerifyError:  # the plan recomputes from a buffer that is lost
        assume(False)
    problem = replace(problem, budget_bytes=budget_bytes)
    plan = settle_in_room(problem, choices, KeepAll())
    assert fits(problem, lower(problem, plan))
    assert plan.choices == settle(problem, choices, KeepAll(), lean.by_op).choices
    for op, _ in problem.profile.alternatives:
        cost = problem.profile.cost(op, plan.variant(op))
        assert cost.seconds <= problem.profile.cost(op, lean.variant(op)).seconds
        for other in problem.profile.costs[op]:
            if other.seconds < cost.seconds:
                beside = _most_beside(problem, lean, op)
                assert beside + other.workspace_bytes > problem.budget_bytes


def _most_beside(problem: Problem, plan: Plan, op: int) -> int:
    """The most that is held at any run of `op`, without its workspace."""
    bare = replace(problem.profile, workspace_bytes=(0,) * len(problem.trace.ops), alternatives=())
    program = lower(problem, plan)
    body = [
        replace(x, action=replace(x.action, variant=0)) if isinstance(x.action, Run) else x
        for x in program.body
    ]
    held = held_bytes(
        replace(problem, profile=bare, between_bytes=0),
        replace(program, body=tuple(body)),
        Tier.DEVICE,
    )
    return max(
        held[position]
        for position, each in enumerate(body)
        if isinstance(each.action, Run) and each.action.op == op
    )


# ---- SuperNeurons -------------------------------------------------------------------------------

RUNTIME = "superneurons-cost-aware{min_bytes=1B}"


def test_superneurons_takes_what_is_left_at_each_layer():
    """Maps of 1 KiB: ops 0 to 5 hold one more each, and the cache evicts nothing.

    With room for six maps and half of one, op 0 holds one and the image, op 4 five.
    """
    problem = towers()
    plain = resolve(RUNTIME).plan(problem)
    most = least(problem, plain)
    problem = with_alternatives(
        replace(problem, budget_bytes=most),
        {op: (Cost(5e-4, 1200), Cost(1e-4, 3000)) for op in range(5)},
    )
    plan = resolve(RUNTIME).plan(problem)
    assert plan.choices == ()
    assert [plan.variant(op) for op in range(5)] == [2, 2, 2, 1, 0]
    assert (
        resolve("superneurons-cost-aware{min_bytes=1B,workspaces=false}").plan(problem).variants
        == ()
    )


@drawn
@given(problem=problems(), cache=st.booleans())
def test_workspaces_evict_nothing(problem, cache):
    """The choices are the same as if each op had only its leanest variant."""
    lean = variants_of(problem.profile, Algorithms.MEMORY)
    costs = [problem.profile.cost(op.id, lean.get(op.id, 0)) for op in problem.trace.ops]
    only = Profile(
        tuple(cost.seconds for cost in costs),
        tuple(cost.workspace_bytes for cost in costs),
        problem.profile.source,
    )
    policy = parse_policy(f"superneurons-cost-aware{{min_bytes=1B,cache={str(cache).lower()}}}")
    found: list[object] = []
    for each in (problem, replace(problem, profile=only)):
        try:
            found.append(policy.plan(each).choices)
        except InfeasibleError as error:
            found.append((error.tier, error.floor_bytes))
    assert found[0] == found[1]


# ---- vDNN's passes ------------------------------------------------------------------------------


def test_the_passes_of_vdnn_dyn_in_order():
    """The backward of the second convolution has a fast and a less fast algorithm.

    With nothing offloaded, r1, the indices, p1 and r2 are held while it runs. With the inputs of
    convolutions offloaded, p1 is not. With everything offloaded, only r2 is.
    """
    fast, less = Cost(1e-4, 2000 * KB), Cost(5e-4, 600 * KB)
    problem = with_alternatives(network(), {11: (fast, less)})
    placements = {
        "none": {},
        "conv": resolve("vdnn-conv{min_bytes=1B}").plan(problem).by_gap,
        "all": resolve("vdnn-all{min_bytes=1B}").plan(problem).by_gap,
    }

    def floor_of(placement: str, variant: int) -> int:
        return least(problem, make_plan(dict(placements[placement]), variants={11: variant}))

    order = [("none", 1), ("conv", 1), ("all", 1), ("conv", 2), ("conv", 0), ("all", 2), ("all", 0)]
    floors = [floor_of(*each) for each in order]
    names = {"none": set(), "conv": {"p1", "r2"}, "all": {"p1", "r2", "r1", "indices"}}
    assert floors[:5] == sorted(floors[:5], reverse=True)
    assert floors[6] < floors[4]
    spec = "vdnn-dyn{min_bytes=1B}"
    in_flight = floors[3] + 250 * KB  # p1 comes back during op 11
    for budget, (placement, variant) in (
        *zip((*floors[:3], in_flight), order[:4], strict=True),
        *((nbytes - 1, each) for nbytes, each in zip(floors[:3], order[1:4], strict=True)),
        (in_flight - 1, order[4]),
    ):
        tight = replace(problem, budget_bytes=budget)
        assert set(chosen(tight, spec)) == names[placement]
        assert resolve(spec).plan(tight).variant(11) == variant
    below = replace(problem, budget_bytes=floors[4])
    assert set(chosen(below, spec)) == names["conv"]
    assert resolve(spec).plan(below).variants == ()
    below = replace(problem, budget_bytes=floors[4] - 1)
    assert set(chosen(below, spec)) == names["all"]
    with pytest.raises(InfeasibleError) as caught:
        resolve(spec).plan(replace(problem, budget_bytes=floors[6] - 1))
    assert caught.value.floor_bytes == floors[6]


@drawn
@given(problem=problems())
def test_without_alternatives_vdnn_dyn_is_the_first_placement_that_fits(problem):
    plain = replace(problem, profile=replace(problem.profile, alternatives=()))
    dyn = VdnnDyn(min_bytes=1)
    statics = (VdnnAll(min_bytes=1), KeepAll(), VdnnConv(min_bytes=1))
    everything, *others = (_choices(policy, plain) for policy in statics)
    if isinstance(everything, InfeasibleError):
        found = _choices(dyn, plain)
        assert isinstance(found, InfeasibleError)
        assert found.floor_bytes == everything.floor_bytes
        return
    fitting = [each for each in others if not isinstance(each, InfeasibleError)]
    assert _choices(dyn, plain) == [*fitting, everything][0]
    assert dyn.plan(plain).variants == ()


def _choices(policy, problem):
    try:
        return policy.plan(problem).choices
    except InfeasibleError as error:
        return error
