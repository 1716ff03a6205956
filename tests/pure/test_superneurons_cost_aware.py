"""superneurons-cost-aware: the figures of its paper, and its rules by hand."""

from dataclasses import replace

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, peak
from outcore.ir.plan import Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Copy, Run
from outcore.ir.trace import Effect, Phase, Ref, Role
from outcore.lower import lower
from outcore.policies.superneurons.cost_aware import Recomputation, SuperNeuronsCostAware
from outcore.policies.superneurons.layers import fetch_points, layers_of
from outcore.policies.superneurons.segments import Layer, bounded, segments
from tests.pure.building import TraceBuilder, small_hardware
from tests.pure.caffe_layers import MIB, Layers, alexnet, resnet

STRATEGIES = (Recomputation.SPEED, Recomputation.MEMORY, Recomputation.COST_AWARE)
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def per_strategy(*expected: float) -> list[tuple[Recomputation, float]]:
    return list(zip(STRATEGIES, expected, strict=True))


def runtime(replay: Recomputation, *, cache: bool = True) -> SuperNeuronsCostAware:
    return SuperNeuronsCostAware(min_bytes=1, replay=replay, cache=cache)


def replays(network: Layers, replay: Recomputation) -> int:
    problem = network.problem()
    body = lower(problem, runtime(replay).plan(problem)).body
    return sum(isinstance(step.action, Run) and step.action.again for step in body)


def peak_mib(problem: Problem, policy: SuperNeuronsCostAware) -> float:
    """The peak on the device, in MiB; the images and the tangent take only a few bytes here."""
    return peak(problem, lower(problem, policy.plan(problem)), Tier.DEVICE).nbytes / MIB


def moved_bytes(problem: Problem, policy: SuperNeuronsCostAware) -> int:
    program = lower(problem, policy.plan(problem))
    copies = (step.action for step in program.body if isinstance(step.action, Copy))
    buffers = (program.slots[copy.source].buffer for copy in copies)
    return sum(problem.trace.buffers[b].nbytes for b in buffers)


# ---- the paper's figures ------------------------------------------------------------------------


@pytest.mark.parametrize(("replay", "extra"), per_strategy(14, 23, 17))
def test_table_1_alexnet_replays(replay, extra):
    assert replays(alexnet(200), replay) == extra


@pytest.mark.parametrize(
    ("layers", "extra"), [(50, (84, 118, 85)), (101, (169, 237, 170))], ids=["50", "101"]
)
def test_table_1_resnet_replays(layers, extra):
    """If no normalization follows the convolution of a shortcut."""
    found = tuple(replays(resnet(16, BLOCKS[layers], project=()), each) for each in STRATEGIES)
    assert found == extra


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="four replays more: the published networks normalize four short cuts, which Table 1 "
    "leaves no room for (the published code replays one segment only before a join)",
)
@pytest.mark.parametrize(("replay", "extra"), per_strategy(84, 118, 85))
def test_table_1_resnet_50_as_published(replay, extra):
    assert replays(resnet(16, BLOCKS[50], project=("bn",)), replay) == extra


def test_resnet_50_as_published_takes_four_more():
    found = [replays(resnet(16, BLOCKS[50], project=("bn",)), each) for each in STRATEGIES]
    assert found == [88, 122, 89]


@pytest.mark.parametrize(("replay", "mib"), per_strategy(993.018, 886.23, 886.23))
@pytest.mark.parametrize("cache", [True, False])
def test_table_1_alexnet_peaks(replay, mib, cache):
    found = peak_mib(alexnet(200).problem(), runtime(replay, cache=cache))
    assert found == pytest.approx(mib, abs=1e-3)


def test_section_4_1_1_liveness():
    found = peak_mib(alexnet(200).problem(), runtime(Recomputation.NONE))
    assert found == pytest.approx(1489.355, abs=1e-3)


def test_section_4_1_1_offloading():
    """At POOL2's backward, as in the paper, and 0.1 MiB less."""
    problem = alexnet(200).problem()
    policy = runtime(Recomputation.NONE, cache=False)
    assert peak_mib(problem, policy) == pytest.approx(1132.155, rel=1e-4)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the outputs of all convolutions, there and back, are 1.26 GiB at 256 images; the paper "
    "has 2.56 GB and does not say what else moved (its intercept is that of the weights)",
)
def test_table_3_without_cache():
    moved = moved_bytes(alexnet(256).problem(), runtime(Recomputation.COST_AWARE, cache=False))
    assert moved / 2**30 == pytest.approx(2.56, rel=0.1)


def test_table_3_the_cache_moves_nothing_up_to_896_images_and_the_rest_moves_in_proportion():
    budget_bytes = 12 * 2**30
    moved = []
    for batch in (256, 896):
        problem = alexnet(batch).problem(budget_bytes)
        assert moved_bytes(problem, runtime(Recomputation.COST_AWARE)) == 0
        moved.append(moved_bytes(problem, runtime(Recomputation.COST_AWARE, cache=False)))
    assert moved[1] * 256 == moved[0] * 896


def test_the_less_memory_the_more_the_cache_moves():
    budgets = (1500, 1400, 1200, 1000, 890)
    problems = [alexnet(200).problem(mib * MIB) for mib in budgets]
    moved = [moved_bytes(problem, runtime(Recomputation.NONE)) for problem in problems]
    assert moved == sorted(moved)
    assert moved[0] == 0 < moved[-1]


# ---- segments -----------------------------------------------------------------------------------


def test_segments_of_alexnet():
    found = segments(layers_of(alexnet(1).problem()))
    assert [len(segment) for segment in found] == [3, 3, 1, 1, 2, 2, 2, 1]


def layer(*inputs: int, checkpoint: bool = False, forward: int = 1, backward: int = 0) -> Layer:
    return Layer(inputs, checkpoint, forward, backward)


def test_each_branch_after_a_checkpoint_is_a_segment_and_a_merge_goes_on_with_its_last_input():
    graph = [layer(checkpoint=True), layer(0), layer(0), layer(1), layer(2, 3), layer(4)]
    assert segments(graph) == ((1, 3, 4, 5), (2,))


def test_a_segment_is_bounded_by_its_forwards_and_its_last_backward():
    graph = [
        layer(checkpoint=True, forward=100),
        layer(0, forward=10, backward=50),
        layer(1, forward=20, backward=40),
        layer(2, forward=3),
    ]
    assert bounded(graph, (1, 2, 3), 10 + 20 + 3 + 40)
    assert not bounded(graph, (1, 2, 3), 10 + 20 + 3 + 40 - 1)


# ---- layers in a trace --------------------------------------------------------------------------


def marks(t: TraceBuilder, inputs: list[int], saved: list[int]) -> list[bool]:
    """Which of the ops so far are checkpoints, if backward reads `saved`."""
    tangent, grad = t.new(1, Role.GRAD), t.new(1, Role.GRAD)
    reads = tuple(Ref(v) for v in (tangent, *saved))
    t.op("test.backward", reads, (grad,), Phase.BACKWARD)
    return [each.checkpoint for each in layers_of(problem_of(t, inputs, tangent, grad))]


def problem_of(t: TraceBuilder, inputs: list[int], tangent: int, grad: int) -> Problem:
    trace = t.trace(inputs, (), [tangent], (Ref(grad),))
    n = len(trace.ops)
    return Problem(
        trace, Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED), small_hardware(), 1 << 40
    )


def chain(*targets: str, saved: tuple[int, ...]) -> list[bool]:
    t = TraceBuilder()
    made = [t.new(8, Role.INPUT, borrowed=True)]
    for target in targets:
        out = t.new(8, Role.ACTIVATION)
        t.op(target, (Ref(made[-1]),), (out,))
        made.append(out)
    return marks(t, made[:1], [made[i + 1] for i in saved])


def test_convolutions_linear_layers_and_attention_are_checkpoints():
    targets = (
        "aten.convolution.default",
        "aten.relu.default",
        "aten.addmm.default",
        "aten.tanh.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten.mul.Tensor",
    )
    assert chain(*targets, saved=(0, 1, 2, 3, 4, 5)) == [True, False] * 3


def test_what_reads_a_checkpoint_that_backward_does_not_read_stands_for_it():
    targets = ("aten.addmm.default", "aten.relu.default", "aten.tanh.default")
    assert chain(*targets, saved=(0, 1, 2)) == [True, False, False]
    assert chain(*targets, saved=(1, 2)) == [True, True, False]
    assert chain(*targets, saved=(2,)) == [True, True, True]


def test_joins_concatenations_and_forks_are_checkpoints():
    t = TraceBuilder()
    x, bias = t.new(8, Role.INPUT, borrowed=True), t.new(8, Role.PARAM, borrowed=True)
    a, b, c, d, e, f = (t.new(8, Role.ACTIVATION) for _ in range(6))
    t.op("aten.add.Tensor", (Ref(x), Ref(bias)), (a,))  # a bias: no join
    t.op("aten.tanh.default", (Ref(a),), (b,))  # read twice: a fork
    t.op("aten.tanh.default", (Ref(b),), (c,))
    t.op("aten.add.Tensor", (Ref(b), Ref(c)), (d,))
    t.op("aten.tanh.default", (Ref(d),), (e,))
    t.op("aten.cat.default", ((Ref(e),),), (f,))
    assert marks(t, [x, bias], [a, b, c, d, e, f]) == [False, True, False, True, False, True]


def test_what_may_not_run_again_is_a_checkpoint():
    t = TraceBuilder()
    x = t.new(8, Role.INPUT, borrowed=True)
    a, b = (t.new(8, Role.ACTIVATION) for _ in range(2))
    t.op("test.f", (Ref(x),), (a,), effects=[Effect.UNREPEATABLE])
    t.op("test.f", (Ref(a),), (b,), effects=[Effect.RANDOM])
    assert marks(t, [x], [a, b]) == [True, False]


# ---- the pool and the cache ---------------------------------------------------------------------


def offloads(problem: Problem, plan: Plan) -> dict[str, Offload]:
    return {
        problem.trace.buffers[gap.buffer].name: choice
        for gap, choice in plan.choices
        if isinstance(choice, Offload)
    }


def towers(count: int = 6) -> Problem:
    """Convolutions of 1 KiB in a row; the backward of each reads what it read."""
    t = TraceBuilder()
    x = t.new(1, Role.INPUT, borrowed=True)
    made = [x]
    for number in range(count):
        out = t.new(256, Role.ACTIVATION, name=f"a{number}")
        t.op("aten.convolution.default", (Ref(made[-1]),), (out,))
        made.append(out)
    tangent = grad = t.new(1, Role.GRAD)
    for value in reversed(made[:-1]):
        before, grad = grad, t.new(1, Role.GRAD)
        target = "aten.convolution_backward.default"
        t.op(target, (Ref(before), Ref(value)), (grad,), Phase.BACKWARD)
    return problem_of(t, [x], tangent, grad)


def test_the_pool_fetches_one_convolution_ahead():
    problem = towers()
    points = fetch_points(problem.trace)
    assert points == [6, 7, 8, 9, 10]  # the backward of the last one reads the images only
    found = offloads(problem, runtime(Recomputation.COST_AWARE, cache=False).plan(problem))
    assert {name: choice.prefetch for name, choice in found.items()} == {  # a4 is never idle
        "a3": 6,
        "a2": 7,
        "a1": 8,
        "a0": 9,
    }


def test_the_cache_evicts_the_least_recently_used_where_memory_is_short():
    problem = towers()
    roomy = runtime(Recomputation.COST_AWARE)
    assert roomy.plan(problem).choices == ()
    most = peak(problem, lower(problem, roomy.plan(problem)), Tier.DEVICE).nbytes
    for short in (1, 2):
        tight = replace(problem, budget_bytes=most - 1024 * (short - 1) - 1)
        found = offloads(tight, roomy.plan(tight))
        assert list(found) == [f"a{i}" for i in range(short)]
        for number, choice in enumerate(found.values()):
            # Memory is freed right before the op that would have reached the peak, not earlier.
            assert choice.depart == choice.release == 6 - short + number
            assert choice.prefetch is not None
            assert choice.prefetch >= problem.trace.boundary


def test_the_cache_makes_room_for_the_pause_between_the_calls():
    problem = towers()
    policy = runtime(Recomputation.COST_AWARE)
    paused = replace(problem, between_bytes=4096, budget_bytes=4096 + 2048 + 64)
    plan = policy.plan(paused)
    assert list(offloads(paused, plan)) == ["a0", "a1", "a2"]
    assert peak(paused, lower(paused, plan), Tier.DEVICE).nbytes <= paused.budget_bytes


def bypassed() -> Problem:
    """Four maps of 1 KiB that backward reads, beside one of 8 KiB that a late forward op reads."""
    t = TraceBuilder()
    x = t.new(1, Role.INPUT, borrowed=True)
    aside = t.new(2048, Role.ACTIVATION, name="aside")
    t.op("aten.convolution.default", (Ref(x),), (aside,))
    made = [x]
    for number in range(4):
        made.append(t.new(256, Role.ACTIVATION, name=f"a{number}"))
        t.op("aten.convolution.default", (Ref(made[-2]),), (made[-1],))
    t.op("aten.add.Tensor", (Ref(made[-1]), Ref(aside)), (t.new(1, Role.ACTIVATION),))
    tangent = grad = t.new(1, Role.GRAD)
    for value in reversed(made[1:]):
        before, grad = grad, t.new(1, Role.GRAD)
        t.op(
            "aten.convolution_backward.default", (Ref(before), Ref(value)), (grad,), Phase.BACKWARD
        )
    return replace(problem_of(t, [x], tangent, grad), budget_bytes=10 * 1024 + 256)


def test_where_the_host_has_no_room_for_the_least_recently_used_what_crosses_is_evicted():
    problem, policy = bypassed(), runtime(Recomputation.NONE)
    assert "aside" in offloads(problem, policy.plan(problem))
    tight = replace(problem, host_budget_bytes=5 * 1024)
    plan = policy.plan(tight)
    assert set(offloads(tight, plan)) == {f"a{i}" for i in range(4)}
    assert fits(tight, lower(tight, plan))
    with pytest.raises(InfeasibleError, match="no plan fits a host budget") as caught:
        policy.plan(replace(problem, host_budget_bytes=2048))
    enough = replace(problem, host_budget_bytes=caught.value.floor_bytes)
    assert fits(enough, lower(enough, policy.plan(enough)))


def test_without_an_outer_tier_the_replays_are_all_there_is():
    problem = alexnet(1).problem()
    hardware = replace(problem.hardware, capacity_bytes=((Tier.DEVICE, 1 << 50),), links=())
    choices = (
        runtime(Recomputation.COST_AWARE).plan(replace(problem, hardware=hardware)).by_gap.values()
    )
    assert choices
    assert all(isinstance(choice, Recompute) for choice in choices)
