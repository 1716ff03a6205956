"""overflow: what the host has no room for goes to the disk."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Hardware, Link, Tier, staging_bytes
from outcore.ir.liveness import dead_gaps, gaps
from outcore.ir.memory import fits, staging_needed, tier_bytes
from outcore.ir.plan import Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Effect, Phase, Ref, Role
from outcore.ir.verify_plan import verify_plan
from outcore.lower import lower, lower_without_overlap
from outcore.planfile import check_saved
from outcore.policies import floor_plan, overflow, resolve, with_roomy_host
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, dense_plan, dense_problem
from tests.pure.strategies import hardwares, problems

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
MAPS, MAP_BYTES = 10, 1024
SWAP_ALL = resolve("swap-all{min_bytes=512B}").plan


def chained(
    host_bytes: int, disk_bytes: int = 1 << 20, sizes: Sequence[int] = (MAP_BYTES,) * MAPS
) -> Problem:
    """A chain of maps of `sizes`, read again in reverse, on a machine with three tiers."""
    t = TraceBuilder()
    x = t.new(1, Role.INPUT, borrowed=True)
    made = [x]
    for size in sizes:
        made.append(t.new(size // 4, Role.ACTIVATION))
        t.op("test.f", (Ref(made[-2]),), (made[-1],))
    out, grad = t.new(1, Role.ACTIVATION), t.new(1, Role.GRAD)
    t.op("test.loss", (Ref(made[-1]),), (out,))
    tangent = grad
    for value in reversed(made[1:]):
        before, grad = grad, t.new(1, Role.GRAD)
        t.op("test.b", (Ref(before), Ref(value)), (grad,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(grad),))
    n = len(trace.ops)
    fast, slow = Link(1e6), Link(1e5)
    hardware = Hardware(
        "three tiers",
        ((DEVICE, 1 << 20), (HOST, host_bytes), (DISK, disk_bytes)),
        ((DEVICE, HOST, fast), (HOST, DEVICE, fast), (DEVICE, DISK, slow), (DISK, DEVICE, slow)),
    )
    profile = Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED)
    return Problem(trace, profile, hardware, budget_bytes=4 * max(sizes))


def spilling(problem: Problem) -> Plan:
    """The plan that the runtime makes if the host has too little memory."""
    return overflow(problem, SWAP_ALL(with_roomy_host(problem)))


def away(plan: Plan) -> dict[int, Tier]:
    """The op after which each offloaded buffer leaves -> its tier."""
    return {gap.after: c.tier for gap, c in plan.choices if isinstance(c, Offload)}


def test_a_host_with_room_takes_all():
    plan = spilling(chained(MAPS * MAP_BYTES))
    assert set(away(plan).values()) == {HOST}


@pytest.mark.parametrize("spec", ["swap-all", "swap-opt", "pooch", "lms"])
def test_a_disk_does_not_replace_a_host_without_budget(spec: str) -> None:
    """Copies to a disk beyond the host pass through host memory, which `host_budget` bounds."""
    policy = resolve(f"{spec}{{min_bytes=512B}}")
    problem = replace(chained(1 << 20), host_budget_bytes=0)
    with pytest.raises(InfeasibleError, match="no plan fits a device budget"):
        policy.plan(problem)
    plan = floor_plan(problem)
    assert not away(plan)
    check_saved(problem, plan)
    alone = replace(problem.hardware, capacity_bytes=((DEVICE, 1 << 20), (DISK, 1 << 20)))
    plan = policy.plan(replace(problem, hardware=alone))
    assert set(away(plan).values()) == {DISK}


def test_what_leaves_first_goes_to_the_disk():
    problem = chained(staging_bytes(MAP_BYTES) + 3 * MAP_BYTES)
    plan = spilling(problem)
    order = [tier for _, tier in sorted(away(plan).items())]
    assert order == [DISK] * (MAPS - 3) + [HOST] * 3
    program = lower(problem, plan)
    assert fits(problem, program)
    assert tier_bytes(problem, program, HOST) == 3 * MAP_BYTES
    assert plan.policy == "swap-all{min_bytes=512B}"


def test_what_goes_to_the_disk_leaves_variants_alone():
    problem = chained(staging_bytes(MAP_BYTES) + 3 * MAP_BYTES)
    profile = replace(problem.profile, alternatives=((1, (Cost(5e-4, 0),)),))
    problem = replace(problem, profile=profile)
    plan = overflow(problem, replace(SWAP_ALL(with_roomy_host(problem)), variants=((1, 1),)))
    assert DISK in away(plan).values()
    assert plan.variants == ((1, 1),)


def test_a_large_map_stays_where_small_ones_will_do():
    """What goes to the disk passes through four staging buffers of its size."""
    sizes = [MAP_BYTES] * 14 + [10 * MAP_BYTES] + [MAP_BYTES] * 6
    problem = chained(22 * MAP_BYTES, sizes=sizes)
    plan = spilling(problem)
    assert staging_needed(problem.trace, plan) == staging_bytes(MAP_BYTES)
    assert fits(problem, lower(problem, plan))
    assert overflow(problem, plan) == plan
    with pytest.raises(InfeasibleError):
        overflow(replace(problem, host_budget_bytes=staging_bytes(MAP_BYTES)), plan)


def test_copies_to_the_disk_take_their_own_time():
    slow, fast = (
        simulate(p, lower(p, spilling(p)))
        for p in (chained(6 * MAP_BYTES), chained(MAPS * MAP_BYTES))
    )
    assert slow.seconds > 2 * fast.seconds


@pytest.mark.parametrize(
    ("host_bytes", "disk_bytes", "tier"),
    [(staging_bytes(MAP_BYTES) - 1, 1 << 20, "host"), (6 * MAP_BYTES, 6 * MAP_BYTES, "disk")],
)
def test_too_little_of_both_is_refused(host_bytes, disk_bytes, tier):
    with pytest.raises(InfeasibleError) as caught:
        spilling(chained(host_bytes, disk_bytes))
    assert caught.value.tier == tier


@given(data=st.data())
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_the_plan_fits_every_tier(data):
    problem, hardware = data.draw(problems()), data.draw(hardwares(tiers=(HOST, DISK)))
    host = data.draw(st.integers(0, 8000))
    problem = replace(problem, hardware=hardware, host_budget_bytes=host, disk_budget_bytes=None)
    try:
        plan = spilling(problem)
    except InfeasibleError:
        return
    verify_plan(problem, plan)
    program = lower(problem, plan)
    assert fits(problem, program)
    assert inside_the_host(problem, plan, program)
    simulate(problem, program)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_the_plan_of_a_program_without_overlap_fits_the_outer_tiers(data):
    problem, hardware = data.draw(problems()), data.draw(hardwares(tiers=(HOST, DISK)))
    host = data.draw(st.integers(0, 8000))
    problem = replace(problem, hardware=hardware, host_budget_bytes=host, disk_budget_bytes=None)
    every = make_plan(dict.fromkeys(gaps(problem.trace), Offload(HOST)))
    try:
        plan = overflow(problem, every, overlap=False)
    except InfeasibleError:
        return
    program = lower_without_overlap(problem, plan)
    assert inside_the_host(problem, plan, program)
    assert tier_bytes(problem, program, DISK) <= problem.limit_bytes(DISK)


def inside_the_host(problem: Problem, plan: Plan, program: Program) -> bool:
    taken = tier_bytes(problem, program, HOST) + staging_needed(problem.trace, plan)
    return taken <= problem.limit_bytes(HOST)


def two_in_turn(host_bytes: int = MAP_BYTES) -> Problem:
    """One map waits until the next one begins to, and both leave the device for a large one.

    With overlap, the first comes back before the second leaves, which then takes its place.
    """
    t = TraceBuilder()
    x = t.new(16, Role.INPUT, borrowed=True)
    first, second, large = (t.new(n, Role.ACTIVATION) for n in (256, 256, 512))

    def op(read: int, made: int = 0) -> int:
        made = made or t.new(16, Role.ACTIVATION)
        t.op("test.f", (Ref(read),), (made,), effects=[Effect.UNREPEATABLE])
        return made

    for read, made in ((x, first), *((x, 0),) * 5, (x, second), (first, 0), (x, 0), (x, large)):
        op(read, made)
    for read in (large, x):
        op(read)
    trace = t.trace([x], (Ref(op(second)),))
    n = len(trace.ops)
    profile = Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED)
    return replace(chained(host_bytes), trace=trace, profile=profile, budget_bytes=2560)


def test_without_overlap_copies_lie_in_the_host_for_longer() -> None:
    problem = two_in_turn()
    plan = make_plan(dict.fromkeys(gaps(problem.trace), Offload(HOST)))
    assert set(away(overflow(problem, plan)).values()) == {HOST}
    with pytest.raises(InfeasibleError) as caught:
        overflow(problem, plan, overlap=False)
    assert (caught.value.tier, caught.value.floor_bytes) == ("host", 2 * MAP_BYTES)
    enough = replace(problem, host_budget_bytes=2 * MAP_BYTES)
    found = overflow(enough, plan, overlap=False)
    assert fits(enough, lower_without_overlap(enough, found))


def test_what_is_held_for_reruns_goes_to_the_disk_as_well() -> None:
    problem = dense_problem(layers=40)
    dead = dead_gaps(problem.trace)
    everything = dense_plan(problem).by_gap | dict.fromkeys(dead, Offload(HOST))
    room = staging_bytes(1024) + 4 * 1024
    plan = overflow(replace(problem, host_budget_bytes=room), make_plan(everything))
    tiers = [c.tier for g, c in plan.choices if g.dead and isinstance(c, Offload)]
    assert len(tiers) == len(dead)
    assert set(tiers) == {HOST, DISK}
    verify_plan(problem, plan)
