"""liveness: producers, uses, held buffers, and the gaps between uses."""

from itertools import pairwise

from hypothesis import given

from outcore.ir.liveness import gaps, liveness
from outcore.ir.plan import Gap
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Effect, Ref, Role, Trace, refs
from tests.pure.building import TraceBuilder
from tests.pure.strategies import small_trace, traces


def edited(old: str, new: str) -> Trace:
    text = to_text(small_trace())
    assert old in text
    return parse(text.replace(old, new, 1), Trace)


def test_liveness_of_the_small_trace() -> None:
    live = liveness(small_trace())
    names = [b.name or str(b.id) for b in small_trace().buffers]
    assert dict(zip(names, zip(live.producer, live.uses, live.held, strict=True), strict=True)) == {
        "x": (None, (0, 8), True),
        "conv.weight": (None, (0, 8), True),
        "linear.weight": (None, (4, 5), True),
        "conv": (0, (0, 1, 3, 8), False),
        "dropped": (1, (1, 2, 7), False),
        "curved": (2, (2, 3, 6), False),
        "mixed": (3, (3, 4, 5), False),
        "out": (4, (4,), True),
        "tangent": (None, (5,), False),
        "9": (5, (5, 6), False),
        "10": (5, (5,), True),
        "11": (6, (6, 7), False),
        "12": (7, (7, 8), False),
        "13": (8, (8,), True),
    }


def test_gaps_of_the_small_trace() -> None:
    trace = small_trace()
    assert gaps(trace) == (
        Gap(3, 1, 3),
        Gap(3, 3, 8),
        Gap(4, 2, 7),
        Gap(5, 3, 6),
        Gap(6, 4, 5),  # neighbors, but the boundary lies between
    )


def test_what_an_op_mutates_is_held() -> None:
    assert not liveness(small_trace()).held[4]
    assert liveness(edited("-> %5 @", "-> %5 !mutates @")).held[4]


def test_what_no_op_can_free_is_held() -> None:
    t = TraceBuilder()
    x, out, tangent = (t.new(16, role) for role in (Role.INPUT, Role.ACTIVATION, Role.GRAD))
    assert liveness(t.trace([x], (), [tangent], (None,))).held == (True, False, True)
    t.op("test.f", (Ref(x),), (out,))
    assert liveness(t.trace([x], (Ref(out),), [tangent], (None,))).held == (False, True, True)


def test_what_the_caller_passes_and_does_not_hold_has_gaps() -> None:
    trace = edited('borrowed "x"', '"x"')
    assert Gap(0, 0, 8) in gaps(trace)


def test_an_unused_output_is_used_where_it_is_made() -> None:
    trace = edited("gradients none, %15, %12", "gradients none, %15")
    live = liveness(trace)
    assert (live.producer[10], live.uses[10], live.held[10]) == (5, (5,), False)


def test_a_value_inside_a_list_counts_as_a_use() -> None:
    trace = edited("mm_backward(%10, %8, %2)", "mm_backward(%10, ((%8,),), weight=(%2,))")
    assert liveness(trace) == liveness(small_trace())


def uses_by_definition(trace: Trace, buffer: int) -> list[int]:
    """The ops that name a value on `buffer`, in arguments or results."""

    def touched(values: tuple[int | None, ...]) -> bool:
        return any(trace.values[v].buffer == buffer for v in values if v is not None)

    return [
        op.id
        for op in trace.ops
        if touched(tuple(r.value for r in refs((op.args, tuple(a for _, a in op.kwargs)))))
        or touched(op.outputs)
    ]


@given(traces(mutates=True))
def test_uses_are_the_ops_that_touch_a_buffer(trace: Trace) -> None:
    live = liveness(trace)
    for buffer in trace.buffers:
        uses, producer = live.uses[buffer.id], live.producer[buffer.id]
        assert list(uses) == uses_by_definition(trace, buffer.id)
        assert producer is None or uses[0] == producer


@given(traces(mutates=True))
def test_held_buffers_are_those_the_caller_has_an_op_mutates_or_no_op_can_free(
    trace: Trace,
) -> None:
    returned = {trace.values[r.value].buffer for r in refs((trace.outputs, trace.gradients))}
    mutated = {
        buffer for op in trace.ops if Effect.MUTATES in op.effects for buffer in trace.reads[op.id]
    }
    borrowed = {b.id for b in trace.buffers if b.borrowed}
    last = trace.tangents if trace.boundary == len(trace.ops) else ()
    held = {i for i, held in enumerate(liveness(trace).held) if held}
    assert held == returned | mutated | borrowed | {trace.values[v].buffer for v in last}


@given(traces(mutates=True))
def test_gaps_are_sorted_idle_and_worth_something(trace: Trace) -> None:
    live = liveness(trace)
    found = gaps(trace)
    assert list(found) == sorted(set(found))
    for gap in found:
        uses = live.uses[gap.buffer]
        assert not live.held[gap.buffer]
        assert uses[uses.index(gap.after) + 1] == gap.before
        assert gap.before - gap.after > 1 or gap.before == trace.boundary


@given(traces())
def test_every_idle_stretch_of_what_may_leave_is_a_gap(trace: Trace) -> None:
    live = liveness(trace)
    found = set(gaps(trace))
    for buffer, uses in enumerate(live.uses):
        for after, before in pairwise(uses):
            if not live.held[buffer] and before - after > 1:
                assert Gap(buffer, after, before) in found
