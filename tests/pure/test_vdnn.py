"""vDNN by hand: its layers, and when buffers leave and come back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.plan import Gap, Offload
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import resolve
from outcore.policies.floor import plan_floor
from outcore.policies.vdnn.layers import Layer, find_prefetch, layers
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder

KB = 1000
ROOMY = 1 << 40


def network(budget_bytes: int = ROOMY) -> Problem:
    """x, conv, relu, pool, conv, relu, conv, relu, mm; then mm, relu, conv and so on backward.

    Every map has 250 kB, which take 2.5 ms to copy; an op takes 1 ms. The pool has indices of
    500 B. What is retained: r1 and the indices by the pool, p1 and r2 by convolutions, r3 by the
    last layer. Relus read r1, r2 and r3 after those layers.
    """
    t, back = TraceBuilder(), Phase.BACKWARD
    x = t.new(1, Role.INPUT, borrowed=True)
    w = t.new(1, Role.PARAM, borrowed=True)
    c1, r1, p1, c2, r2, c3, r3 = (
        t.new(250 * KB // 4, Role.ACTIVATION, name=name)
        for name in ("c1", "r1", "p1", "c2", "r2", "c3", "r3")
    )
    indices = t.new(125, Role.ACTIVATION, name="indices")
    out, tangent = t.new(1, Role.ACTIVATION), t.new(1, Role.GRAD)
    t.op("aten.convolution.default", (Ref(x), Ref(w)), (c1,))
    t.op("aten.relu.default", (Ref(c1),), (r1,))
    t.op("aten.max_pool2d_with_indices.default", (Ref(r1),), (p1, indices))
    t.op("aten.convolution.default", (Ref(p1), Ref(w)), (c2,))
    t.op("aten.relu.default", (Ref(c2),), (r2,))
    t.op("aten.convolution.default", (Ref(r2), Ref(w)), (c3,))
    t.op("aten.relu.default", (Ref(c3),), (r3,))
    t.op("aten.mm.default", (Ref(r3), Ref(w)), (out,))
    grad = tangent
    for target, read in (
        ("aten.mm.default", (r3,)),
        ("aten.mm.default", (w,)),
        ("aten.threshold_backward.default", (r3,)),
        ("aten.convolution_backward.default", (r2, w)),
        ("aten.threshold_backward.default", (r2,)),
        ("aten.convolution_backward.default", (p1, w)),
        ("aten.max_pool2d_with_indices_backward.default", (r1, indices)),
        ("aten.threshold_backward.default", (r1,)),
        ("aten.convolution_backward.default", (x, w)),
    ):
        before, grad = grad, t.new(1, Role.GRAD)
        t.op(target, (Ref(before), *map(Ref, read)), (grad,), back)
    trace = t.trace([x, w], (Ref(out),), [tangent], (Ref(grad),))
    link = Link(1e8)
    hardware = Hardware(
        "hand",
        ((Tier.DEVICE, 1 << 30), (Tier.HOST, 1 << 30)),
        ((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link)),
    )
    count = len(trace.ops)
    profile = Profile((1e-3,) * count, (0,) * count, Source.ESTIMATED)
    return Problem(trace, profile, hardware, budget_bytes)


def chosen(problem: Problem, policy: str) -> dict[str, Offload]:
    """The offloads of a policy, by the names of buffers."""
    names = {b.id: b.name for b in problem.trace.buffers}
    choices = resolve(policy).plan(problem).by_gap
    found = {
        names[g.buffer]: choice for g, choice in choices.items() if isinstance(choice, Offload)
    }
    assert len(found) == len(choices)
    return found


# ---- layers -------------------------------------------------------------------------------------


def test_a_layer_is_a_backward_op_that_reads_what_was_retained():
    problem = network()
    name = {b.id: b.name for b in problem.trace.buffers}
    found = [
        (layer.op, [name[gap.buffer] for gap in layer.gaps], layer.convolution)
        for layer in layers(problem, 1)
    ]
    assert found == [
        (8, ["r3"], False),
        (11, ["r2"], True),
        (13, ["p1"], True),
        (14, ["r1", "indices"], False),
    ], "relus come after the layers they share with; the first convolution retains x, which is held"


def test_what_only_an_activation_retains_is_of_no_layer():
    """A relu before a sum: only the relu's own backward reads its result again."""
    t = TraceBuilder()
    x = t.new(4, Role.INPUT, borrowed=True)
    a, b, out, tangent, g1, g2 = (t.new(4, Role.ACTIVATION) for _ in range(6))
    t.op("aten.exp.default", (Ref(x),), (a,))
    t.op("aten.relu.default", (Ref(a),), (b,))
    t.op("aten.sum.default", (Ref(b),), (out,))
    t.op("aten.threshold_backward.default", (Ref(tangent), Ref(b)), (g1,), Phase.BACKWARD)
    t.op("aten.mul.Tensor", (Ref(g1), Ref(a)), (g2,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(g2),))
    problem = replace(
        network(), trace=trace, profile=Profile((0.0,) * 5, (0,) * 5, Source.ESTIMATED)
    )
    assert layers(problem, 1) == (Layer(4, (Gap(1, 1, 4),)),)


def test_what_pooling_reads_is_retained_though_its_gradient_is_made_without():
    """A relu before a pool: only the relu's backward reads its result again, and is its layer."""
    t = TraceBuilder()
    x = t.new(4, Role.INPUT, borrowed=True)
    a, b, out, indices, tangent, g1, g2 = (t.new(4, Role.ACTIVATION) for _ in range(7))
    t.op("aten.exp.default", (Ref(x),), (a,))
    t.op("aten.relu.default", (Ref(a),), (b,))
    t.op("aten.max_pool2d_with_indices.default", (Ref(b),), (out, indices))
    target = "outcore.max_pool2d_with_indices_backward.default"
    t.op(target, (Ref(tangent), (4,), (1,), Ref(indices)), (g1,), Phase.BACKWARD)
    t.op("aten.threshold_backward.default", (Ref(g1), Ref(b)), (g2,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(g2),))
    problem = replace(
        network(), trace=trace, profile=Profile((0.0,) * 5, (0,) * 5, Source.ESTIMATED)
    )
    assert layers(problem, 1) == (
        Layer(3, (Gap(indices, 2, 3),)),
        Layer(4, (Gap(b, 2, 4),)),
    )


def test_a_convolution_beside_another_layer_shares_its_input():
    """Backward, the pool reads `fork` before the convolution; it is a convolution's input."""
    t, back = TraceBuilder(), Phase.BACKWARD
    x = t.new(4, Role.INPUT, borrowed=True)
    fork, c, p, out, tangent, g1, g2, g3 = (t.new(4, Role.ACTIVATION) for _ in range(8))
    t.op("aten.exp.default", (Ref(x),), (fork,))
    t.op("aten.convolution.default", (Ref(fork), Ref(x)), (c,))
    t.op("aten.max_pool2d.default", (Ref(fork),), (p,))
    t.op("aten.add.Tensor", (Ref(c), Ref(p)), (out,))
    t.op("aten.max_pool2d_backward.default", (Ref(tangent), Ref(fork)), (g1,), back)
    t.op("aten.convolution_backward.default", (Ref(tangent), Ref(fork), Ref(x)), (g2,), back)
    t.op("aten.add.Tensor", (Ref(g1), Ref(g2)), (g3,), back)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(g3),))
    problem = replace(
        network(), trace=trace, profile=Profile((0.0,) * 7, (0,) * 7, Source.ESTIMATED)
    )
    gap = Gap(1, 2, 4)
    assert layers(problem, 1) == (Layer(4, (gap,), (gap,)), Layer(5, (), (), convolution=True))


def test_a_weight_that_was_cast_is_no_input_beside_images_that_are_kept():
    t, back = TraceBuilder(), Phase.BACKWARD
    x, w = (t.new(4, role, borrowed=True) for role in (Role.INPUT, Role.PARAM))
    tangent = t.new(4, Role.GRAD)
    first, cast, c, g1, g2 = (t.new(4, Role.ACTIVATION) for _ in range(5))
    t.op("aten.exp.default", (Ref(x),), (first,))
    t.op("aten._to_copy.default", (Ref(w),), (cast,))
    t.op("aten.convolution.default", (Ref(x), Ref(cast)), (c,))
    t.op("aten.mul.Tensor", (Ref(tangent), Ref(first)), (g1,), back)
    t.op("aten.convolution_backward.default", (Ref(g1), Ref(x), Ref(cast)), (g2,), back)
    trace = t.trace([x, w], (Ref(c),), [tangent], (Ref(g2),))
    problem = replace(
        network(), trace=trace, profile=Profile((0.0,) * 5, (0,) * 5, Source.ESTIMATED)
    )
    _, convolution = layers(problem, 1)
    assert [gap.buffer for gap in convolution.gaps] == [cast]
    assert convolution.inputs == ()


# ---- when copies go and come --------------------------------------------------------------------


def test_all_leaves_beside_its_layer_and_comes_back_one_layer_ahead():
    host = Tier.HOST
    assert chosen(network(), "vdnn-all{min_bytes=1B}") == {
        "r1": Offload(host, depart=2, release=3, prefetch=13, arrive=14),
        "indices": Offload(host, release=4, prefetch=13, arrive=14),
        "p1": Offload(host, depart=3, release=4, prefetch=11, arrive=12),
        "r2": Offload(host, depart=5, release=6, prefetch=8, arrive=9),
    }


def test_conv_takes_the_inputs_of_convolutions():
    found = chosen(network(), "vdnn-conv{min_bytes=1B}")
    assert found == {
        name: choice
        for name, choice in chosen(network(), "vdnn-all{min_bytes=1B}").items()
        if name in {"p1", "r2"}
    }


def test_streams_meet_at_the_end_of_each_layer():
    """Three layers forward and three backward each wait 1.5 ms for the copy issued with them."""
    problem = network()
    plan = resolve("vdnn-all{min_bytes=1KiB}").plan(problem)
    timeline = simulate(problem, lower(problem, plan))
    assert timeline.seconds == pytest.approx(17 * 1e-3 + 6 * 1.5e-3)


def as_published(order: list[Layer], offloaded: set[Gap]) -> dict[int, int]:
    """The paper's search: forward numbering, a flag per layer, a new search from each layer."""
    prefetched: set[int] = set()
    found = {}
    for now in range(len(order)):
        for other in range(now + 1, len(order)):
            if offloaded & set(order[other].gaps) and other not in prefetched:
                prefetched.add(other)
                found[other] = now
                break
            if order[other].convolution:
                break
    return found


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_search_is_that_of_the_paper(drawn):
    order = [Layer(10 + i, (Gap(i, 0, 10 + i),), (), c) for i, (_, c) in enumerate(drawn)]
    offloaded = {order[i].gaps[0] for i, (away, _) in enumerate(drawn) if away}
    assert find_prefetch(order, offloaded) == as_published(order, offloaded)


# ---- the dynamic policy -------------------------------------------------------------------------


def test_dyn_offloads_no_more_than_it_must():
    spec = "vdnn-dyn{min_bytes=1B}"
    needs = {
        name: plan_floor(network(), resolve(name).plan(network())).nbytes
        for name in ("keep-all", "vdnn-conv{min_bytes=1B}", "vdnn-all{min_bytes=1B}")
    }
    keep, conv, everything = needs.values()
    assert everything < conv < keep
    names = {"p1", "r2"}
    assert chosen(network(keep), spec) == {}
    assert set(chosen(network(keep - 1), spec)) == names
    assert set(chosen(network(conv), spec)) == names
    assert set(chosen(network(conv - 1), spec)) == names | {"r1", "indices"}
    with pytest.raises(InfeasibleError) as caught:
        resolve(spec).plan(network(everything - 1))
    assert caught.value.floor_bytes == everything
    assert caught.value.policy == spec


def test_dyn_fails_where_the_host_has_no_room_for_all():
    """The first pass fails, though the inputs of convolutions would fit, and so would keep-all."""
    tight = replace(network(), host_budget_bytes=500 * KB)
    for spec in ("vdnn-all{min_bytes=1B}", "vdnn-dyn{min_bytes=1B}"):
        with pytest.raises(InfeasibleError) as caught:
            resolve(spec).plan(tight)
        assert (caught.value.tier, caught.value.floor_bytes) == ("host", 750 * KB + 500)
        assert caught.value.policy == spec
