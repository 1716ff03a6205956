"""estimate: seconds of ops from formulas for arithmetic and memory traffic, and their variants."""

from dataclasses import replace

import pytest
from hypothesis import given

from outcore.errors import OptionValueError
from outcore.estimate import Efficiency, columns, estimate, flops
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.profile import Source
from outcore.ir.trace import Arg, Phase, Ref, Role
from tests.pure.building import TraceBuilder, small_hardware
from tests.pure.strategies import traces

MACHINE = Hardware(
    "round numbers",
    ((Tier.DEVICE, 1 << 30),),
    (),
    flops_per_second=(("float32", 1e12),),
    memory_bytes_per_second=1e9,
)
PEAK = Efficiency(1.0, 1.0, 1.0, 1.0)


def one_op(target, shapes, result, *more, results=1):
    """A trace of one op that reads one value per shape in `shapes` and makes `results` values."""
    t = TraceBuilder()

    def value(shape, role):
        items = 1
        for side in shape:
            items *= side
        whole = t.new(items, role)
        strides: list[int] = []
        step = 1
        for side in reversed(shape):
            strides.insert(0, step)
            step *= side
        return t.view(whole, tuple(shape), tuple(strides))

    inputs = [value(shape, Role.INPUT) for shape in shapes]
    outputs = tuple(value(result, Role.ACTIVATION) for _ in range(results))
    t.op(target, (*map(Ref, inputs), *more), outputs, Phase.FORWARD)
    return t.trace(inputs, tuple(map(Ref, outputs)))


X, W, Y = (2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 6, 6)
PRODUCTS = 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)
CONVOLUTION = (None, (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize(
    ("target", "shapes", "result", "more", "expected"),
    [
        ("aten.mm.default", [(4, 5), (5, 6)], (4, 6), (), 2 * 4 * 5 * 6),
        ("aten.bmm.default", [(3, 4, 5), (3, 5, 6)], (3, 4, 6), (), 2 * 3 * 4 * 5 * 6),
        ("aten.addmm.default", [(6,), (4, 5), (5, 6)], (4, 6), (), 2 * 4 * 5 * 6),
        ("aten.relu.default", [(4, 5)], (4, 5), (), 0),
        (
            "aten.convolution.default",
            [X, W],
            Y,
            (*CONVOLUTION, False, (0, 0), 1),
            PRODUCTS,
        ),
        (
            "aten.convolution.default",  # grouped: each group reads one channel of three
            [X, (6, 1, 3, 3)],
            (2, 6, 6, 6),
            (*CONVOLUTION, False, (0, 0), 3),
            2 * (2 * 6 * 6 * 6) * (1 * 3 * 3),
        ),
        (
            "aten.convolution.default",  # transposed: each element of the input is spread out
            [Y, W],
            X,
            (*CONVOLUTION, True, (0, 0), 1),
            PRODUCTS,
        ),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            [(2, 4, 16, 8), (2, 4, 32, 8), (2, 4, 32, 8)],
            (2, 4, 16, 8),
            (),
            2 * 2 * (2 * 4 * 16 * 8) * 32,
        ),
        (
            "aten._scaled_dot_product_flash_attention_backward.default",  # the gradient comes first
            [(2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 32, 8), (2, 4, 32, 8)],
            (2, 4, 16, 8),
            (),
            5 * 2 * (2 * 4 * 16 * 8) * 32,
        ),
        ("aten.baddbmm.default", [(3, 4, 6), (3, 4, 5), (3, 5, 6)], (3, 4, 6), (), 720),
        ("mylib.mm.default", [(4, 5), (5, 6)], (4, 6), (), 0),
    ],
    ids=[
        "mm",
        "bmm",
        "addmm",
        "relu",
        "convolution",
        "grouped",
        "transposed",
        "attention",
        "attention-backward",
        "baddbmm",
        "somebody-elses",
    ],
)
def test_flops_by_formula(target, shapes, result, more, expected):
    assert flops(one_op(target, shapes, result, *more)) == (expected,)


def test_a_backward_convolution_computes_what_is_asked_for():
    more = ((0,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False))
    trace = one_op("aten.convolution_backward.default", [Y, X, W], X, *more, results=2)
    assert flops(trace) == (2 * PRODUCTS,)
    (op,) = trace.ops
    weight_only = replace(op, outputs=(None, op.outputs[1]))
    assert flops(replace(trace, ops=(weight_only,))) == (PRODUCTS,)


def test_the_gradient_of_a_convolutions_input_alone():
    target, rest = "outcore.convolution_input_gradient.default", ((0,), *CONVOLUTION[1:])
    trace = one_op(target, [Y, W], X, *rest, False, (0, 0), 1)
    (op,) = trace.ops
    op = replace(op, args=(op.args[0], X, (192, 64, 8, 1), *op.args[1:]))
    assert flops(replace(trace, ops=(op,))) == (PRODUCTS,)


ONE, CUBE, MADE = (1, 2, 6, 6, 6), (3, 2, 3, 3, 3), (1, 3, 4, 4, 4)
COLUMNS = 4 * (2 * 3 * 3 * 3) * (4 * 4 * 4)
GEOMETRY = (1, 1, 1), (0, 0, 0), (1, 1, 1)


@pytest.mark.parametrize(
    ("source", "kernel", "groups", "expected"),
    [
        (ONE, CUBE, 1, COLUMNS + 4 * 2 * 6 * 6 * 6),
        ((2, *ONE[1:]), CUBE, 1, 0),
        ((1, 2, 600, 60, 6), CUBE, 1, 0),
        (ONE, (3, 1, 3, 3, 3), 2, 0),
        (ONE, (3, 2, 1, 1, 1), 1, 0),
        (ONE, (3, 2, 3, 4, 4), 1, 0),
    ],
    ids=["one", "two", "large", "groups", "1x1", "large kernel"],
)
def test_convolutions_that_torch_computes_itself(source, kernel, groups, expected):
    more = (None, *GEOMETRY, False, (0, 0, 0), groups)
    assert columns(one_op("aten.convolution.default", [source, kernel], MADE, *more)) == (expected,)


def test_gradients_of_convolutions_that_torch_computes_itself():
    more = ((3,), *GEOMETRY, False, (0, 0, 0), 1, (True, True, False))
    trace = one_op("aten.convolution_backward.default", [MADE, ONE, CUBE], ONE, *more, results=2)
    assert columns(trace) == (COLUMNS + 4 * 2 * 6 * 6 * 6,)
    transposed = (None, *GEOMETRY, True, (0, 0, 0), 1)
    trace = one_op("aten.convolution.default", [MADE, CUBE], ONE, *transposed)
    assert columns(trace) == (COLUMNS + 4 * 2 * 6 * 6 * 6,)


def test_the_longer_of_arithmetic_and_memory():
    product = one_op("aten.mm.default", [(1000, 1000), (1000, 1000)], (1000, 1000))
    assert estimate(product, MACHINE, PEAK).seconds == pytest.approx([3 * 4e6 / 1e9])
    fast = replace(MACHINE, memory_bytes_per_second=1e12)
    assert estimate(product, fast, PEAK).seconds == pytest.approx([2e9 / 1e12])
    half = Efficiency(matmul=0.5, memory=1.0)
    assert estimate(product, fast, half).seconds == pytest.approx([4e9 / 1e12])


ITEMS = (8, 4, 4, 4)
ONCE = 8 * 4 * 4 * 4 * 4


@pytest.mark.parametrize(
    ("target", "arguments", "passes"),
    [
        ("aten._native_batch_norm_legit_functional.default", 1, 3),
        ("aten.native_batch_norm_backward.default", 2, 5),
        ("aten.native_layer_norm.default", 1, 3),
        ("aten.native_layer_norm_backward.default", 2, 5),
        ("aten._softmax.default", 1, 3),
        ("aten._softmax_backward_data.default", 2, 3),
        ("aten.relu.default", 1, 2),
        ("aten.threshold_backward.default", 2, 3),
        ("aten.add.Tensor", 2, 3),
    ],
)
def test_passes_over_memory(target, arguments, passes):
    trace = one_op(target, [ITEMS] * arguments, ITEMS)
    assert estimate(trace, MACHINE, PEAK).seconds == pytest.approx([passes * ONCE / 1e9])


def test_an_embedding_reads_the_rows_it_writes():
    trace = one_op("aten.embedding.default", [(1000, 8), (4,)], (4, 8))
    assert estimate(trace, MACHINE, PEAK).seconds == pytest.approx([(16 + 2 * 4 * 8 * 4) / 1e9])


def test_convolutions_of_float32_compute_in_tf32_where_there_is_such_a_thing():
    convolution = one_op("aten.convolution.default", [X, W], Y, *CONVOLUTION, False, (0, 0), 1)
    fast = replace(MACHINE, memory_bytes_per_second=1e15)
    tf32 = replace(fast, flops_per_second=(("float32", 1e12), ("tfloat32", 8e12)))
    (plain,), (faster,) = (estimate(convolution, m, PEAK).seconds for m in (fast, tf32))
    assert plain / faster == pytest.approx(8, rel=1e-3)


def test_an_expanded_view_moves_what_there_is():
    t = TraceBuilder()
    scalar, out = t.new(1, Role.INPUT), t.new(100, Role.ACTIVATION)
    t.op("aten.clone.default", (Ref(t.view(scalar, (100,), (0,))),), (out,))
    trace = t.trace([scalar], (Ref(out),))
    assert estimate(trace, MACHINE, PEAK).seconds == pytest.approx([(4 + 400) / 1e9])


@pytest.mark.parametrize(("dtype", "times"), [("complex64", 4), ("int64", 1)])
def test_products_of_other_numbers_count_in_those_of_float32(dtype, times):
    fast = replace(MACHINE, memory_bytes_per_second=1e18)
    seconds = {}
    for each in ("float32", dtype):
        t = TraceBuilder()
        one, other = (t.new(100 * 100, Role.INPUT, dtype=each) for _ in range(2))
        made = t.new(100 * 100, Role.ACTIVATION, dtype=each)
        square = [t.view(value, (100, 100), (100, 1)) for value in (one, other, made)]
        t.op("aten.mm.default", tuple(map(Ref, square[:2])), (square[2],))
        (seconds[each],) = estimate(t.trace([one, other], (Ref(made),)), fast, PEAK).seconds
    assert seconds[dtype] / seconds["float32"] == pytest.approx(times, rel=1e-3)


def test_what_a_machine_lacks_is_named():
    product = one_op("aten.mm.default", [(2, 2), (2, 2)], (2, 2))
    with pytest.raises(OptionValueError, match="no memory bandwidth"):
        estimate(product, replace(MACHINE, memory_bytes_per_second=0.0))
    with pytest.raises(OptionValueError, match=r"no compute rate for float32.*bfloat16"):
        estimate(product, replace(MACHINE, flops_per_second=(("bfloat16", 1e12),)))


@given(trace=traces())
def test_every_op_takes_its_launch_at_least(trace):
    profile = estimate(trace, small_hardware())
    assert profile.source is Source.ESTIMATED
    assert len(profile.seconds) == len(profile.workspace_bytes) == len(trace.ops)
    assert min(profile.seconds, default=1) >= small_hardware().op_overhead_seconds


# ---- variants ------------------------------------------------------------------------------------

# 2 samples, 4 channels to 6 maps of 8 x 8: a tile makes 4 x 4 results, so there are 2 * 2 * 2.
SOURCE, KERNEL, RESULT = (2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 8, 8)
TILES = 2 * 2 * 2
PADDED: tuple[Arg, ...] = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
PADDED_BACK: tuple[Arg, ...] = ((0,), *PADDED[1:])
SLOW = replace(MACHINE, flops_per_second=(("float32", 1e6), ("float16", 1e6), ("float64", 1e6)))
WORKSPACE = 36 * 4 * (TILES * 4 + TILES * 6 + 6 * 4)


def alternatives(trace, machine=SLOW):
    return estimate(trace, machine, PEAK, variants=True).alternatives


def backward(*mask):
    """A trace of one backward op that makes the gradients of source and weight set in `mask`."""
    t = TraceBuilder()
    values = {}
    for shape in (RESULT, SOURCE, KERNEL):
        strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1]
        for role in (Role.INPUT, Role.GRAD):
            whole = t.new(shape[0] * strides[0], role)
            values[shape, role] = t.view(whole, shape, tuple(strides))
    inputs = [values[shape, Role.INPUT] for shape in (RESULT, SOURCE, KERNEL)]
    outputs = [
        values[shape, Role.GRAD] if wanted else None
        for shape, wanted in zip((SOURCE, KERNEL), mask, strict=True)
    ]
    args = (*map(Ref, inputs), *PADDED_BACK, (*mask, False))
    t.op("aten.convolution_backward.default", args, (*outputs, None))
    return t.trace(inputs, tuple(Ref(v) for v in outputs if v is not None))


def test_the_gradient_of_the_input_alone_costs_what_it_costs_beside_the_other():
    target = "outcore.convolution_input_gradient.default"
    whole = one_op(target, [RESULT, KERNEL], SOURCE, *PADDED_BACK)
    (op,) = whole.ops
    op = replace(op, args=(op.args[0], SOURCE, (1, 1, 1, 1), *op.args[1:]))
    assert alternatives(replace(whole, ops=(op,))) == alternatives(backward(True, False))


def test_a_winograd_convolution_by_hand():
    """36 products, 8 x 4 by 4 x 6, limited by arithmetic; the steps before and after, by memory."""
    trace = one_op("aten.convolution.default", [SOURCE, KERNEL], RESULT, *PADDED)
    tiled, made = WORKSPACE, 36 * 4 * TILES * 6
    moved = 4 * (512 + 216) + (tiled - made) + made + 4 * 768
    computed = 2 * 36 * TILES * 4 * 6
    assert computed == flops(trace)[0] / 4
    ((op, (cost,)),) = alternatives(trace)
    assert (op, cost.workspace_bytes) == (0, tiled)
    assert cost.seconds == pytest.approx(moved / 1e9 + computed / 1e6)
    slower = replace(MACHINE, memory_bytes_per_second=1e6, flops_per_second=(("float32", 1e4),))
    for launch in (0.0, 1.0):
        ((_, (cost,)),) = alternatives(trace, replace(slower, op_overhead_seconds=launch))
        assert cost.seconds == pytest.approx(moved / 1e6 + computed / 1e4 + 3 * launch)


def test_a_winograd_product_may_wait_for_memory():
    trace = one_op("aten.convolution.default", [SOURCE, KERNEL], RESULT, *PADDED)
    slow = replace(SLOW, memory_bytes_per_second=WORKSPACE, flops_per_second=(("float32", 1.4e4),))
    ((_, (cost,)),) = alternatives(trace, slow)
    moved = 4 * (512 + 216 + 768) + 2 * WORKSPACE
    assert cost.seconds == pytest.approx(moved / WORKSPACE)


def test_kernels_of_5_by_5_have_tiles_of_2_by_2():
    more = (None, (1, 1), (2, 2), (1, 1), False, (0, 0), 1)
    trace = one_op("aten.convolution.default", [SOURCE, (6, 4, 5, 5)], RESULT, *more)
    ((_, (cost,)),) = alternatives(trace)
    tiles = 2 * 4 * 4
    assert cost.workspace_bytes == 36 * 4 * (tiles * 4 + tiles * 6 + 6 * 4)
    fewer = 2 * 36 * tiles * 4 * 6
    assert flops(trace)[0] / fewer == pytest.approx(4 * 25 / 36)
    assert cost.seconds == pytest.approx(fewer / 1e6, rel=1e-2)


def test_tiles_at_the_edge_count_whole():
    trace = one_op("aten.convolution.default", [(2, 4, 7, 9), KERNEL], (2, 6, 7, 9), *PADDED)
    ((_, (cost,)),) = alternatives(trace)
    tiles = 2 * 2 * 3
    assert cost.workspace_bytes == 36 * 4 * (tiles * 4 + tiles * 6 + 6 * 4)


def test_gradients_come_one_after_the_other_in_one_workspace():
    """Each is as much arithmetic as forward. The gradient's tiles are made once for each."""
    whole, source, weight = (
        alternatives(backward(*mask))[0][1][0]
        for mask in ((True, True), (True, False), (False, True))
    )
    assert whole.seconds == pytest.approx(source.seconds + weight.seconds)
    assert whole.workspace_bytes == source.workspace_bytes == weight.workspace_bytes == WORKSPACE
    moved = 4 * (512 + 216 + 768) + WORKSPACE
    computed = 2 * 36 * TILES * 4 * 6
    for cost in (source, weight):
        assert cost.seconds == pytest.approx(moved / 1e9 + computed / 1e6)


@pytest.mark.parametrize(
    ("kernel", "result", "geometry"),
    [
        (KERNEL, (2, 6, 4, 4), ((2, 2), (1, 1), (1, 1), False, (0, 0), 1)),
        (KERNEL, (2, 6, 6, 6), ((1, 1), (1, 1), (2, 2), False, (0, 0), 1)),
        ((6, 2, 3, 3), RESULT, ((1, 1), (1, 1), (1, 1), False, (0, 0), 2)),
        ((4, 6, 3, 3), RESULT, ((1, 1), (1, 1), (1, 1), True, (0, 0), 1)),
        ((6, 4, 1, 1), RESULT, ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)),
        ((6, 4, 7, 7), RESULT, ((1, 1), (3, 3), (1, 1), False, (0, 0), 1)),
        ((6, 4, 3, 5), RESULT, ((1, 1), (1, 2), (1, 1), False, (0, 0), 1)),
    ],
    ids=["stride", "dilation", "groups", "transposed", "1x1", "7x7", "3x5"],
)
def test_what_winograd_does_not_fit(kernel, result, geometry):
    trace = one_op("aten.convolution.default", [SOURCE, kernel], result, None, *geometry)
    assert alternatives(trace) == ()


@pytest.mark.parametrize(("dtype", "known"), [("float32", 1), ("float16", 1), ("float64", 0)])
def test_types_that_winograd_fits(dtype, known):
    trace = one_op("aten.convolution.default", [SOURCE, KERNEL], RESULT, *PADDED)
    values = tuple(replace(value, dtype=dtype) for value in trace.values)
    found = alternatives(replace(trace, values=values))
    assert len(found) == known
    if dtype == "float16":
        assert found[0][1][0].workspace_bytes == WORKSPACE // 2


def test_an_alternative_is_faster_than_the_default_or_not_listed():
    trace = one_op("aten.convolution.default", [SOURCE, KERNEL], RESULT, *PADDED)
    fast = replace(MACHINE, flops_per_second=(("float32", 1e15),))
    assert alternatives(trace, fast) == ()
    plain, both = (estimate(trace, SLOW, PEAK, variants=wanted) for wanted in (False, True))
    assert plain.alternatives == ()
    assert replace(both, alternatives=()) == plain
    assert both.cost(0, 1).seconds < both.cost(0).seconds
