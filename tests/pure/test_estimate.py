"""Seconds without a device: arithmetic by formula, memory traffic, the longer of the two."""

from dataclasses import replace

import pytest
from hypothesis import given

from outcore.errors import OptionValueError
from outcore.estimate import Efficiency, estimate, flops
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.profile import Source
from outcore.ir.trace import Phase, Ref, Role
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
    """A trace of one op that reads a value of each of `shapes` and makes `result`."""
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
            "aten.convolution.default",  # of groups: each sees one channel in three
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


def test_what_a_machine_lacks_is_named():
    product = one_op("aten.mm.default", [(2, 2), (2, 2)], (2, 2))
    with pytest.raises(OptionValueError, match="no rate of its memory"):
        estimate(product, replace(MACHINE, memory_bytes_per_second=0.0))
    with pytest.raises(OptionValueError, match=r"no rate of arithmetic for float32.*bfloat16"):
        estimate(product, replace(MACHINE, flops_per_second=(("bfloat16", 1e12),)))


@given(trace=traces())
def test_every_op_takes_its_launch_at_least(trace):
    profile = estimate(trace, small_hardware())
    assert profile.source is Source.ESTIMATED
    assert len(profile.seconds) == len(profile.workspace_bytes) == len(trace.ops)
    assert min(profile.seconds, default=1) >= small_hardware().op_overhead_seconds
