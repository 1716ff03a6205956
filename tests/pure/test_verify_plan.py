"""verify_plan: each rule of a plan, and what lowering refuses."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import DigestError, VerifyError
from outcore.ir.hardware import Hardware
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.store import digest
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Trace
from outcore.ir.verify import verify_trace
from outcore.ir.verify_plan import verify_plan
from outcore.lower import lower
from tests.pure.strategies import plans, problems, small_hardware, small_problem, small_trace


def with_trace(old: str, new: str) -> Problem:
    """`small_problem` with a piece of its trace's text replaced."""
    text = to_text(small_trace())
    assert old in text
    return dataclasses.replace(small_problem(), trace=parse(text.replace(old, new, 1), Trace))


def with_hardware(old: str, new: str) -> Problem:
    """`small_problem` with a piece of its machine's text replaced."""
    text = to_text(small_hardware())
    assert old in text
    hardware = parse(text.replace(old, new, 1), Hardware)
    return dataclasses.replace(small_problem(), hardware=hardware)


def plan_of(*gaps: str) -> Plan:
    return parse("\n".join(("plan", *(f"gap {gap}" for gap in gaps))), Plan)


def refused(problem: Problem, plan: Plan, rule: str, detail: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_plan(problem, plan)
    error = caught.value
    assert error.noun == "plan"
    assert rule in error.rule
    assert detail in error.detail


@given(st.data())
def test_drawn_plans_pass(data: st.DataObject) -> None:
    problem = data.draw(problems())
    verify_plan(problem, data.draw(plans(problem)))


@pytest.mark.parametrize(
    "gap",
    [
        "3 after 1 before 8 offload host",  # two gaps in one
        "3 after 0 before 1 offload host",  # neighbors
        "3 after 1 before 2 keep",
        "0 after 0 before 8 offload host",  # held by the caller
        "7 after 4 before 5 recompute",  # returned by the forward call
        "99 after 1 before 3 keep",
        "-1 after 1 before 3 keep",
        "3 after 1 before 99 offload host",
    ],
)
def test_a_choice_is_for_a_gap_of_the_trace(gap: str) -> None:
    refused(small_problem(), plan_of(gap), "a gap of the trace", "no idle stretch of a buffer")


def test_what_an_op_mutates_has_no_gap() -> None:
    problem = with_trace("!random", "!mutates")
    gap = "3 after 3 before 8 offload host"
    refused(problem, plan_of(gap), "a choice is for a gap of the trace", "")


@pytest.mark.parametrize(
    ("gaps", "detail"),
    [
        (("3 after 3 before 8 keep", "3 after 1 before 3 keep"), "gap 3 after 3 before 8"),
        (("4 after 2 before 7 keep", "3 after 3 before 8 keep"), "gap 4 after 2 before 7"),
        (
            ("3 after 1 before 3 recompute", "3 after 1 before 3 offload host"),
            "gap 3 after 1 before 3",
        ),
    ],
)
def test_gaps_are_sorted_and_listed_once(gaps: tuple[str, ...], detail: str) -> None:
    refused(small_problem(), plan_of(*gaps), "gaps are sorted", f"it comes after {detail}")


@pytest.mark.parametrize(
    ("effects", "detail"),
    [
        ("!mutates", "op 1 aten.dropout.default is mutates"),
        ("!collective", "op 1 aten.dropout.default is collective"),
        ("!unrepeatable !random", "op 1 aten.dropout.default is random, unrepeatable"),
    ],
)
def test_what_is_recomputed_was_made_by_an_op_that_may_run_again(effects: str, detail: str) -> None:
    plan = plan_of("4 after 2 before 7 recompute stay")
    refused(with_trace("!random", effects), plan, "an op that may run again", detail)


def test_what_is_recomputed_was_made_by_an_op() -> None:
    plan = plan_of("0 after 0 before 8 recompute")
    refused(with_trace("borrowed ", ""), plan, "was made by an op", "the caller passes it in")


@pytest.mark.parametrize(
    ("old", "new", "choice", "rule", "detail"),
    [
        ("", "", "offload device", "leaves the device", "its tier is the device"),
        ("capacity disk 1048576 B\n", "", "offload disk", "has room", "small has no disk tier"),
        ("disk 1048576 B", "disk 0 B", "offload disk", "has room", "small has no disk tier"),
        ("link host device", "link host disk", "offload host", "there and back", "from host to"),
        ("link device host", "link disk host", "offload host", "there and back", "from device to"),
    ],
)
def test_what_is_offloaded_can_go_and_come_back(
    old: str, new: str, choice: str, rule: str, detail: str
) -> None:
    refused(with_hardware(old, new), plan_of(f"3 after 3 before 8 {choice}"), rule, detail)


OUTSIDE = [
    "depart 2",
    "depart 9",
    "release 3",
    "release 9",
    "prefetch 0",
    "prefetch 3",
    "arrive 3",
    "arrive 9",
]


@pytest.mark.parametrize("hint", OUTSIDE)
def test_hints_lie_inside_the_gap(hint: str) -> None:
    plan = plan_of(f"3 after 3 before 8 offload host {hint}")
    refused(small_problem(), plan, "hints name ops inside the gap", hint)


@pytest.mark.parametrize(
    ("hints", "detail"),
    [
        ("depart 6 release 5", "depart 6 and release 5"),
        ("depart 6 prefetch 5", "depart 6 and prefetch 5"),
        ("depart 6 arrive 5", "depart 6 and arrive 5"),
        ("prefetch 7 arrive 6", "prefetch 7 and arrive 6"),
        ("depart 4 release 8 prefetch 7 arrive 6", "prefetch 7 and arrive 6"),
    ],
)
def test_hints_come_in_order_of_time(hints: str, detail: str) -> None:
    plan = plan_of(f"3 after 3 before 8 offload host {hints}")
    refused(small_problem(), plan, "departs before its release and before it comes back", detail)


def test_what_departs_beside_an_op_was_there_before_it() -> None:
    verify_plan(small_problem(), plan_of("5 after 3 before 6 offload host depart 3"))
    plan, rule = plan_of("2 after 1 before 2 offload host depart 1"), "was there before it"
    refused(mutating_problem(CHAIN), plan, rule, "op 1 makes buffer 2")


def test_messages_show_the_gap_and_the_name_of_the_buffer() -> None:
    with pytest.raises(VerifyError, match=r"at gap 3 after 3 before 8 \(conv\): release 3"):
        verify_plan(small_problem(), plan_of("3 after 3 before 8 offload host release 3"))


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ("", "", "4 after 2 before 7 recompute"),  # random, but repeatable
        ("", "", "6 after 4 before 5 offload host"),  # neighbors, but across the boundary
        ("", "", "3 after 1 before 3 keep"),
        ("", "", "3 after 3 before 8 offload host release 4 prefetch 8"),
        ("", "", "3 after 3 before 8 offload host release 8 prefetch 4"),
        ("", "", "3 after 3 before 8 offload host depart 3 release 4 prefetch 4 arrive 4"),
        ("", "", "3 after 3 before 8 offload host depart 8 release 8 prefetch 8 arrive 8"),
        ("borrowed ", "", "0 after 0 before 8 offload disk"),
        ("!random", "!unrepeatable", "4 after 2 before 7 offload disk release 4 prefetch 6"),
    ],
)
def test_what_a_plan_may_do(old: str, new: str, gap: str) -> None:
    verify_plan(with_trace(old, new), plan_of(gap))


# ---- what lowering refuses -----------------------------------------------------------------------

MUTATING = """
trace boundary 3
buffer 0 input 4 B borrowed "x"
buffer 1 state 4 B borrowed "state"
buffer 2 activation 4 B "f"
buffer 3 activation 4 B "g"
buffer 4 grad 4 B
buffer 5 grad 4 B
value %0 on 0 float32 (1,) stride (1,)
value %1 on 1 float32 (1,) stride (1,)
value %2 on 2 float32 (1,) stride (1,)
value %3 on 3 float32 (1,) stride (1,)
value %4 on 4 float32 (1,) stride (1,)
value %5 on 5 float32 (1,) stride (1,)
inputs %0, %1
op 0 forward f(%1, %0) -> %2
op 1 forward g(%2) -> %3
op 2 forward copy_(%1, %0) -> _ !mutates
outputs %3
tangents %4
op 3 backward h(%4, %2) -> %5
gradients %5
"""


def mutating_problem(text: str = MUTATING) -> Problem:
    """Op 2 writes the state that op 0 read."""
    trace = parse(text, Trace)
    verify_trace(trace)
    ops = len(trace.ops)
    profile = Profile((1e-3,) * ops, (0,) * ops, Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), 10000)


def test_nothing_is_recomputed_from_what_was_mutated_since() -> None:
    problem, plan = mutating_problem(), plan_of("2 after 1 before 3 recompute")
    with pytest.raises(VerifyError) as caught:
        lower(problem, plan)
    assert (caught.value.noun, caught.value.where) == ("plan", "buffer 2 (f)")
    assert caught.value.detail == "op 0 read buffer 1, which op 2 mutated"


def test_what_an_earlier_op_mutated_may_be_read_again() -> None:
    """As above, but the mutation comes first. It runs once, and its effect stays."""
    text = MUTATING.replace("op 0 forward f(%1, %0) -> %2\nop 1 forward g(%2) -> %3\nop 2", "op 0")
    text = text.replace(
        "!mutates\n", "!mutates\nop 1 forward f(%1, %0) -> %2\nop 2 forward g(%2) -> %3\n"
    )
    problem = mutating_problem(text)
    program = lower(problem, plan_of("2 after 2 before 3 recompute"))
    assert "rerun 1 " in to_text(program)


CHAIN = """
trace boundary 2
buffer 0 input 4 B "x"
buffer 1 activation 4 B "f"
buffer 2 activation 4 B "g"
buffer 3 grad 4 B
value %0 on 0 float32 (1,) stride (1,)
value %1 on 1 float32 (1,) stride (1,)
value %2 on 2 float32 (1,) stride (1,)
value %3 on 3 float32 (1,) stride (1,)
inputs %0
op 0 forward f(%0) -> %1
op 1 forward g(%1) -> %2
outputs none
op 2 backward h(%2) -> %3
gradients %3
"""


@pytest.mark.parametrize(
    ("old", "new", "where", "detail"),
    [
        ("-> %1", "-> %1 !unrepeatable", "buffer 1 (f)", "op 0 f may not run again"),
        ("-> %1", "-> %1", "buffer 0 (x)", "the caller passed it in, and it is gone"),
    ],
)
def test_a_chain_ends_at_what_cannot_be_made_again(
    old: str, new: str, where: str, detail: str
) -> None:
    problem = mutating_problem(CHAIN.replace(old, new))
    plan = plan_of("2 after 1 before 2 recompute")
    verify_plan(problem, plan)
    with pytest.raises(VerifyError) as caught:
        lower(problem, plan)
    error = caught.value
    assert (error.noun, error.where, error.detail) == ("plan", where, detail)


def test_a_plan_for_another_trace_is_not_lowered() -> None:
    problem = small_problem()
    named = dataclasses.replace(plan_of("4 after 2 before 7 recompute"), trace_digest="0123")
    with pytest.raises(DigestError, match="this plan was made for trace 0123, not for"):
        lower(problem, named)


def test_a_plan_for_other_measurements_is_lowered_and_the_program_named() -> None:
    problem, unnamed = small_problem(), plan_of("4 after 2 before 7 recompute")
    plan = dataclasses.replace(
        unnamed, problem_digest="another", trace_digest=digest(problem.trace)
    )
    programs = [lower(problem, plan), lower(problem, unnamed), lower(problem, plan, fast=True)]
    assert programs[0] == programs[1] == programs[2]
    assert programs[0].trace_digest == digest(problem.trace)
    assert programs[0].plan_digest == digest(plan)


def test_lowering_verifies_the_problem() -> None:
    problem = dataclasses.replace(small_problem(), budget_bytes=0)
    with pytest.raises(VerifyError, match="the device budget is positive"):
        lower(problem, Plan(()))
