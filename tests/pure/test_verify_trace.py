"""verify_trace: each rule of a trace, and the values that a trace may name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from outcore.errors import VerifyError
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Donation, Op, Ref, Trace
from outcore.ir.verify import verify_trace
from tests.pure.strategies import small_trace, traces


def edited(old: str, new: str) -> Trace:
    """`small_trace` with a piece of its text replaced."""
    text = to_text(small_trace())
    assert old in text
    return parse(text.replace(old, new, 1), Trace)


def edited_text(text: str, *edits: tuple[str, str]) -> Trace:
    """The trace of `text` with several pieces replaced."""
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return parse(text, Trace)


@given(traces(mutates=True))
def test_drawn_traces_pass(trace: Trace) -> None:
    verify_trace(trace)


def test_the_small_trace_passes() -> None:
    verify_trace(small_trace())


ENDS = "it ends at byte"
MISSING = "is not there"

FAULTS = [
    ("buffer 4 ", "buffer 5 ", "ids index", "the id 5"),
    ("value %4 on", "value %3 on", "ids index", "the id 3"),
    ("op 4 ", "op 5 ", "ids index", "the id 5"),
    ("boundary 5", "boundary 10", "the boundary is the first op", "it is 10, and there are 9 ops"),
    ("boundary 5", "boundary -1", "the boundary is the first op", "it is -1"),
    ('256 B "out"', '-256 B "out"', "no size is negative", ""),
    ("value %4 on 4", "value %4 on 14", "a value lies on a listed buffer", "buffer 14"),
    ("value %4 on 4", "value %4 on -1", "a value lies on a listed buffer", "buffer -1"),
    ("value %4 on 4 float32", "value %4 on 4 float31", "the dtype is a known one", "float31"),
    ("(256,) stride (1,)", "(256,) stride (1, 1)", "a stride per dimension", "(1, 1)"),
    ("(256,) stride (1,)", "(-5,) stride (1,)", "no size, stride or offset is negative", "(-5,)"),
    ("(256,) stride (1,)", "(256,) stride (-1,)", "no size, stride or offset is", "(-1,)"),
    ("(256,) stride (1,)", "(256,) stride (1,) offset -1", "no size, stride or offset", "-1"),
    ("(256,) stride (1,)", "(257,) stride (1,)", "inside its buffer", f"{ENDS} 1028 of buffer 0"),
    ("(256,) stride (1,)", "(256,) stride (2,)", "inside its buffer", f"{ENDS} 2044 of buffer 0"),
    ("(256,) stride (1,)", "(256,) stride (1,) offset 1", "inside its buffer", f"{ENDS} 1028"),
    ("(256,) stride (1,)", "(256,) stride (1,) conj", "the first value on a buffer", "conjugate"),
    ("(256,) stride (1,)", "(256,) stride (1,) neg", "the first value on a buffer", "negative"),
    ("value %4 on 4 float32", "value %4 on 4 float64", "inside its buffer", f"{ENDS} 2048"),
    ("op 4 forward", "op 4 backward", "the forward ops are those before the boundary", ""),
    ("op 5 backward", "op 5 forward", "the forward ops are those before the boundary", ""),
    ("boundary 5", "boundary 6", "the forward ops are those before the boundary", ""),
    ("tanh.default(%4)", "tanh.default(%6)", "was passed in or made before", f"6 {MISSING}"),
    ("tanh.default(%4)", "tanh.default(%8)", "was passed in or made before", f"6 {MISSING}"),
    ("tanh.default(%4)", "tanh.default(x=(%4, (%6,)))", "was passed in", f"6 {MISSING}"),
    ("tanh.default(%4)", "tanh.default(%10)", "was passed in or made before", f"8 {MISSING}"),
    ("inputs %0, %1", "inputs %0, %0", "was passed in or made before", f"1 {MISSING}"),
    ("tangents %10", "tangents", "was passed in or made before", f"8 {MISSING}"),
    ("tangents %10", "tangents %10, %3", "what is passed in is new", "buffer 3 is there already"),
    ("tangents %10", "tangents %10, %0", "what is passed in is new", "buffer 0 is there already"),
    ("-> %5", "-> %5, %3", "a buffer is made once", "buffer 3 is there already"),
    ("-> %5", "-> %5, %0", "a buffer is made once", "buffer 0 is there already"),
    ("-> %11, %12", "-> %11, %12, %7", "a buffer is made once", "buffer 7 is there already"),
    ("outputs %7", "outputs %7, %11", "what a call returns was made", "buffer 9 was not"),
    ("outputs %7", "outputs (none, (%10,))", "what a call returns was made", "buffer 8 was not"),
    ("-> _, %15", "-> _", "what a call returns was made by its end", "buffer 13 was not"),
    ("donate 6", "donate 99", "a donation names an op", "there are 9 ops"),
    ("donate 6: %11", "donate 6: %3", "the op reads what is donated", "it does not read %3"),
    ("value %0 on 0 ", 'buffer 14 param 0 B borrowed "lost"\nvalue %0 on 0 ',
     "what is the caller's is passed in or made", "no op makes it, and it is not passed in"),
    ("donate 6: %11 -> %13", "donate 4: %8 -> %7", "both buffers have one size", "1024 B and 256"),
    ("donate 6: %11 -> %13", "donate 6: %11 -> %5", "the op makes what", "it does not make %5"),
    ("%13 on 11 float32", "%13 on 11 int32", "one dtype and layout", "%13 is ('int32'"),
    ("%13 on 11 float32 (256,) stride (1,)", "%13 on 11 float32 (128,) stride (2,)", "layout", ""),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "rule", "detail"), FAULTS)
def test_each_rule_of_a_trace(old: str, new: str, rule: str, detail: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_trace(edited(old, new))
    error = caught.value
    assert error.noun == "trace"
    assert rule in error.rule
    assert detail in error.detail


def test_what_is_donated_is_read_through_one_value() -> None:
    reads_twice = edited_text(
        to_text(small_trace()),
        ("inputs %0", "value %16 on 9 float32 (16, 16) stride (16, 1)\ninputs %0"),
        ("tanh_backward.default(%11, %5)", "tanh_backward.default(%11, %16)"),
    )
    with pytest.raises(VerifyError, match=r"through one value.*it reads %16 too, on buffer 9"):
        verify_trace(reads_twice)
    same_value_twice = edited("tanh_backward.default(%11, %5)", "mul.Tensor(%11, %11)")
    verify_trace(same_value_twice)


@pytest.mark.parametrize("value", [-1, 16, 99])
@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("op 2", lambda t, v: {"ops": with_op(t, args=(Ref(v),))}),
        ("op 2", lambda t, v: {"ops": with_op(t, args=((1, (Ref(v),)),))}),
        ("op 2", lambda t, v: {"ops": with_op(t, kwargs=(("weight", Ref(v)),))}),
        ("op 2", lambda t, v: {"ops": with_op(t, outputs=(v,))}),
        ("inputs", lambda t, v: {"inputs": (*t.inputs, v)}),
        ("tangents", lambda t, v: {"tangents": (v,)}),
        ("outputs", lambda t, v: {"outputs": (Ref(v),)}),
        ("gradients", lambda t, v: {"gradients": (None, (Ref(v),))}),
        ("donations", lambda t, v: {"donations": (Donation(6, v, 13),)}),
        ("donations", lambda t, v: {"donations": (Donation(6, 11, v),)}),
    ],
)
def test_a_trace_cannot_name_a_value_that_it_does_not_list(value: int, where: str, change) -> None:
    trace = small_trace()
    with pytest.raises(VerifyError, match=f"it names %{value}, and there are 16 values") as caught:
        dataclasses.replace(trace, **change(trace, value))
    assert (caught.value.where, caught.value.noun) == (where, "trace")


def with_op(trace: Trace, **changes: Any) -> tuple[Op, ...]:
    ops = list(trace.ops)
    ops[2] = dataclasses.replace(ops[2], **changes)
    return tuple(ops)


def test_what_an_op_returns_of_its_arguments_is_not_made() -> None:
    verify_trace(edited("tanh.default(%4) -> %5", "tanh.default(%4) -> %5, %4"))


def test_an_empty_value_may_lie_anywhere() -> None:
    verify_trace(edited("(256,) stride (1,)", "(0, 9999) stride (9999, 1)"))


def test_forward_only_outputs_are_checked_too() -> None:
    trace = parse(
        "trace boundary 1\n"
        "buffer 0 input 4 B\n"
        "buffer 1 activation 4 B\n"
        "value %0 on 0 float32 (1,) stride (1,)\n"
        "value %1 on 1 float32 (1,) stride (1,)\n"
        "inputs %0\n"
        "op 0 forward f(%0)\n"
        "outputs %1",
        Trace,
    )
    with pytest.raises(VerifyError, match="at outputs: buffer 1 was not"):
        verify_trace(trace)


def test_messages_name_op_target_and_site() -> None:
    with pytest.raises(VerifyError, match=r"at op 2 aten.tanh.default layers.2 \(net.py:12\)"):
        verify_trace(edited("tanh.default(%4)", "tanh.default(%6)"))
