import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import VerifyError
from outcore.ir.plan import Plan
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Trace
from outcore.ir.verify import verify_plan, verify_trace
from tests.pure.strategies import plans, problems, small_problem, small_trace, traces


def edited(old: str, new: str) -> Trace:
    """`small_trace` with a piece of its text replaced."""
    text = to_text(small_trace())
    assert old in text
    return parse(text.replace(old, new, 1), Trace)


# ---- verify_trace --------------------------------------------------------------------------------


@given(traces(mutates=True))
def test_drawn_traces_pass(trace: Trace) -> None:
    verify_trace(trace)


def test_the_small_trace_passes() -> None:
    verify_trace(small_trace())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("buffer 4 ", "buffer 5 ", "ids index"),
        ("value %4 on", "value %3 on", "ids index"),
        ("op 4 ", "op 5 ", "ids index"),
        ("value %4 on 4", "value %4 on 14", "value of an unknown buffer"),
        ("value %4 on 4", "value %4 on -1", "value of an unknown buffer"),
        ("value %4 on 4 float32", "value %4 on 4 float31", "unknown dtype float31"),
        ("(256,) stride (1,)", "(256,) stride (1, 1)", "a stride per dimension"),
        ("(256,) stride (1,)", "(257,) stride (1,)", "value ends at byte 1028 of a buffer of 1024"),
        ("(256,) stride (1,)", "(256,) stride (2,)", "value ends at byte 2044 of a buffer of 1024"),
        ("(256,) stride (1,)", "(256,) stride (1,) offset 1", "value ends at byte 1028"),
        ("(256,) stride (1,)", "(256,) stride (1,) offset -1", "value ends at byte 1020"),
        ("value %4 on 4 float32", "value %4 on 4 float64", "value ends at byte 2048"),
        ("op 4 forward", "op 4 backward", "phases split at the boundary"),
        ("op 5 backward", "op 5 forward", "phases split at the boundary"),
        ("boundary 5", "boundary 6", "phases split at the boundary"),
        ("tanh.default(%4)", "tanh.default(%6)", "buffer 6 read before it is made"),
        ("tanh.default(%4)", "tanh.default(%8)", "buffer 6 read before it is made"),
        ("tanh.default(%4)", "tanh.default(x=(%4, (%6,)))", "buffer 6 read before it is made"),
        ("tanh.default(%4)", "tanh.default(%10)", "buffer 8 read before it is made"),
        ("inputs %0, %1", "inputs %0, %0", "buffer 1 read before it is made"),
        ("tangents %10", "tangents", "buffer 8 read before it is made"),
        ("-> %5", "-> %5, %3", "buffer 3 made twice"),
        ("-> %5", "-> %5, %0", "buffer 0 made twice"),
        ("-> %11, %12", "-> %11, %12, %7", "buffer 7 made twice"),
        ("outputs %7", "outputs %7, %11", "outputs name buffer 9, not made by then"),
        ("outputs %7", "outputs (none, (%10,))", "outputs name buffer 8, not made by then"),
        ("-> _, %15", "-> _", "gradients name buffer 13, not made by then"),
    ],
)  # fmt: skip
def test_each_rule_of_a_trace(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(message)) as caught:
        verify_trace(edited(old, new))
    assert caught.value.noun == "trace"


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
    with pytest.raises(VerifyError, match="outputs name buffer 1, not made by then"):
        verify_trace(trace)


def test_messages_name_op_target_and_site() -> None:
    with pytest.raises(VerifyError, match=r"at op 2 aten.tanh.default layers.2 \(net.py:12\)"):
        verify_trace(edited("tanh.default(%4)", "tanh.default(%6)"))


# ---- verify_plan ---------------------------------------------------------------------------------


@given(st.data())
def test_drawn_plans_pass(data: st.DataObject) -> None:
    problem = data.draw(problems())
    verify_plan(problem, data.draw(plans(problem)))


@pytest.mark.parametrize(
    ("old", "new", "gap", "message"),
    [
        ("", "", "gap 3 after 1 before 8 offload host", "not a gap of this trace"),
        ("", "", "gap 3 after 0 before 1 offload host", "not a gap of this trace"),
        ("", "", "gap 0 after 0 before 8 offload host", "not a gap of this trace"),
        ("", "", "gap 7 after 4 before 5 recompute", "not a gap of this trace"),
        ("", "", "gap 3 after 1 before 2 keep", "not a gap of this trace"),
        ("pinned ", "", "gap 0 after 0 before 8 recompute", "recompute of what no op makes"),
        ("!random", "!mutates", "gap 3 after 3 before 8 offload host", "not a gap of this trace"),
        ("!random", "!mutates", "gap 4 after 2 before 7 recompute", "an op that is mutates"),
        ("!random", "!collective", "gap 4 after 2 before 7 recompute", "an op that is collective"),
        (
            "!random",
            "!unrepeatable !random",
            "gap 4 after 2 before 7 recompute stay",
            "recompute of an op that is random, unrepeatable",
        ),
    ],
)
def test_each_rule_of_a_plan(old: str, new: str, gap: str, message: str) -> None:
    problem = dataclasses.replace(small_problem(), trace=edited(old, new))
    with pytest.raises(VerifyError, match=message) as caught:
        verify_plan(problem, parse(f"plan\n{gap}", Plan))
    assert caught.value.noun == "plan"


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ("", "", "gap 4 after 2 before 7 recompute"),  # random, but repeatable
        ("", "", "gap 6 after 4 before 5 offload host"),  # neighbours, but across the boundary
        ("", "", "gap 3 after 1 before 3 keep"),
        ("pinned ", "", "gap 0 after 0 before 8 offload disk"),
        ("!random", "!unrepeatable", "gap 4 after 2 before 7 offload disk release 4 prefetch 6"),
    ],
)
def test_what_a_plan_may_do(old: str, new: str, gap: str) -> None:
    problem = dataclasses.replace(small_problem(), trace=edited(old, new))
    verify_plan(problem, parse(f"plan\n{gap}", Plan))
