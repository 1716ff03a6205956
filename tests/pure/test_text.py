"""text: nouns print as text and parse back; texts that cannot be read are refused."""

import contextlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import ParseError
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.nouns import Noun
from outcore.ir.plan import Gap, Keep, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import (
    Action,
    Alloc,
    Copy,
    Free,
    Instruction,
    Program,
    Run,
    Slot,
    Stream,
)
from outcore.ir.store import load, save
from outcore.ir.text import instruction_text, op_text, parse, to_text
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.ir.trace import Arg, Effect, Op, Phase, Ref, Role, Symbol, Trace
from outcore.ir.verify import verify_trace
from outcore.ir.verify_plan import verify_plan
from outcore.ir.verify_program import verify_program
from tests.pure.building import TraceBuilder, dense_plan, dense_problem
from tests.pure.strategies import (
    hardwares,
    plans,
    problems,
    profiles,
    small_hardware,
    small_problem,
    traces,
)

Golden = Callable[[str, str], None]

ids = st.integers(0, 99)
id_lists = st.lists(ids, max_size=3).map(tuple)
times = st.floats(min_value=0)
words = st.text(max_size=8)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Alloc, ids),
    st.builds(Free, ids),
    st.builds(Copy, ids, ids),
    st.builds(Run, ids, id_lists, id_lists, st.lists(st.tuples(ids, ids), max_size=2).map(tuple)),
    st.builds(Run, ids, id_lists, id_lists, again=st.just(value=True), variant=ids),
)
streams, tiers, sources = st.sampled_from(Stream), st.sampled_from(Tier), st.sampled_from(Source)
instructions = st.builds(Instruction, actions, streams, id_lists, id_lists)
programs = st.builds(
    Program,
    st.lists(st.builds(Slot, ids, ids, tiers, ids, ids), max_size=4).map(tuple),
    st.lists(instructions, max_size=8).map(tuple),
    ids,
    id_lists,
    id_lists,
    id_lists,
    words,
    words,
)
timelines = st.builds(
    Timeline,
    st.lists(st.builds(Span, ids, streams, times, times), max_size=4).map(tuple),
    st.lists(st.builds(Stall, ids, st.sampled_from(Cause), times), max_size=4).map(tuple),
    st.lists(st.tuples(tiers, ids), max_size=3).map(tuple),
    sources,
)
leaves: st.SearchStrategy[Arg] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    words,
    st.builds(Ref, st.just(0)),
    st.builds(Symbol, words, words),
    st.builds(Symbol, st.sampled_from(["dtype", "none"]), st.sampled_from(["float32", "cpu:0"])),
)
args = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
arg_lists = st.lists(args, max_size=4).map(tuple)


def with_op(op: Op) -> Trace:
    """A trace of one input and `op`."""
    base = parse(
        "trace boundary 1\nbuffer 0 input 4 B\nvalue %0 on 0 float32 (1,) stride (1,)\ninputs %0",
        Trace,
    )
    return Trace(base.buffers, base.values, (op,), 1, base.inputs, ())


def undoes(noun: Noun) -> bool:
    text = to_text(noun)
    parsed = parse(text, type(noun))
    return parsed == noun and to_text(parsed) == text


# ---- parsing undoes printing ---------------------------------------------------------------------


@given(traces(mutates=True))
def test_trace_round_trips(trace: Trace) -> None:
    assert undoes(trace)


@given(problems())
def test_problem_round_trips(problem: Problem) -> None:
    assert undoes(problem)


@given(st.data())
def test_profile_and_plan_round_trip(data: st.DataObject) -> None:
    problem = small_problem()
    assert undoes(data.draw(profiles(problem.trace)))
    assert undoes(data.draw(plans(problem)))


@given(hardwares(), words, st.floats(min_value=0))
def test_hardware_round_trips(hardware: Hardware, name: str, rate: float) -> None:
    assert undoes(hardware)
    link = (Tier.DISK, Tier.DEVICE, Link(rate, rate))
    assert undoes(Hardware(name, (), (link,), duplex=False, flops_per_second=((name, rate),)))


@given(words, words, words)
def test_plan_with_any_policy_text_round_trips(
    policy: str, problem_digest: str, trace_digest: str
) -> None:
    choices = (
        (Gap(0, 1, 2), Keep()),
        (Gap(3, 4, 9), Offload(Tier.DISK, prefetch=8)),
        (Gap(3, 9, 11), Offload(Tier.HOST, release=10)),
        (Gap(3, 11, 15), Offload(Tier.HOST, depart=12, release=13, prefetch=14, arrive=15)),
        (Gap(5, 1, 9), Recompute(stay=True)),
        (Gap(5, 9, 12, dead=True), Keep()),
        (Gap(6, 1, 9, dead=True), Offload(Tier.HOST, depart=2, prefetch=8)),
        (Gap(7, 1, 9, dead=True), Recompute(stay=True)),
    )
    assert undoes(Plan(choices, policy, problem_digest, trace_digest, ((2, 1), (3, 4))))


def test_a_dead_gap_says_so() -> None:
    lines = to_text(dense_plan(dense_problem())).splitlines()[1:]
    assert [line for line in lines if " dead " in line] == [
        "gap 1 after 7 before 12 dead keep",
        "gap 3 after 7 before 11 dead offload host",
        "gap 5 after 7 before 10 dead recompute stay",
    ]
    assert "gap 2 after 2 before 12 recompute" in lines


@given(programs)
def test_program_round_trips(program: Program) -> None:
    assert undoes(program)


@given(timelines)
def test_timeline_round_trips(timeline: Timeline) -> None:
    assert undoes(timeline)


@given(
    target=words,
    arguments=arg_lists,
    kwargs=st.lists(st.tuples(words, args), max_size=2).map(tuple),
    outputs=st.lists(st.sampled_from([None, 0]), max_size=3).map(tuple),
    effects=st.frozensets(st.sampled_from(Effect)),
    site=words,
)
def test_any_op_round_trips(target, arguments, kwargs, outputs, effects, site) -> None:
    phase = Phase.FORWARD
    assert undoes(with_op(Op(0, target, arguments, outputs, phase, kwargs, effects, site)))


@given(arg_lists)
def test_types_of_arguments_survive(arguments: tuple[Arg, ...]) -> None:
    trace = with_op(Op(0, "f", arguments, (), Phase.FORWARD))
    (op,) = parse(to_text(trace), Trace).ops
    assert repr(op.args) == repr(arguments)  # True == 1 == 1.0, but they print differently


def test_not_a_number_survives() -> None:
    trace = with_op(Op(0, "f", (math.nan,), (), Phase.FORWARD))
    (found,) = parse(to_text(trace), Trace).ops[0].args
    assert isinstance(found, float)
    assert math.isnan(found)


# ---- the look of it ------------------------------------------------------------------------------


def test_text_of_a_problem(golden: Golden) -> None:
    golden(to_text(small_problem()), "ir/problem")


def test_text_of_one_op_and_of_one_instruction() -> None:
    conv = small_problem().trace.ops[8]
    assert op_text(conv) == (
        "op 8 backward aten.convolution_backward.default(%14, %0, %3, %1, (false, true), "
        'dtype=dtype:float32) -> _, %15 !unrepeatable @ "layers.8 (net.py:18)"'
    )
    run = Run(12, (3, 4), (9,), donate=((3, 9),))
    instruction = Instruction(run, Stream.COMPUTE, after=(15, 16), pace=(2,))
    text = "17: compute run 12 s3 s4 -> s9 donate s3:s9 after 15 16 pace 2"
    assert instruction_text(17, instruction) == text


def test_values_that_are_not_read_as_they_lie(tmp_path: Path) -> None:
    t = TraceBuilder()
    x = t.new(8, Role.INPUT, dtype="complex64", borrowed=True)
    t.view(x, (4,), (2,), conj=True)
    t.view(x, (4,), (2,), 1, conj=True, neg=True)
    text = to_text(trace := t.trace([x], ()))
    assert "value %1 on 0 complex64 (4,) stride (2,) conj\n" in text
    assert "value %2 on 0 complex64 (4,) stride (2,) offset 1 conj neg\n" in text
    assert parse(text, Trace) == trace
    save(trace, tmp_path / "trace.json")
    assert load(tmp_path / "trace.json", Trace) == trace


def test_comments_blank_lines_and_line_ends_are_free() -> None:
    text = "\r\n# a note\r\nplan policy x\r\n\r\n  # more\r\ngap 1 after 2 before 5 recompute\r\n"
    assert parse(text, Plan) == Plan(((Gap(1, 2, 5), Recompute()),), "x")


def test_lines_of_a_trace_that_are_not_numbered_may_come_in_any_order() -> None:
    trace = small_problem().trace
    header, *lines = to_text(trace).splitlines()
    by_kind = sorted(lines, key=lambda line: line.split()[0])
    assert by_kind != lines
    assert parse("\n".join([header, *by_kind]), Trace) == trace


def examples() -> list[str]:
    """The code blocks of the worked example in docs/ir.md."""
    page = (Path(__file__).parents[2] / "docs" / "ir.md").read_text(encoding="utf-8")
    return re.findall(r"```\n(.*?)```", page.partition("## An example")[2], re.DOTALL)


def test_the_example_of_the_docs_is_valid_and_printed_as_to_text_prints_it() -> None:
    trace_text, plan_text, program_text = examples()
    trace, plan = parse(trace_text, Trace), parse(plan_text, Plan)
    program = parse(program_text, Program)
    assert [to_text(trace), to_text(plan), to_text(program)] == examples()
    profile = Profile((1e-3,) * 7, (0,) * 7, Source.ESTIMATED)
    problem = Problem(trace, profile, small_hardware(), budget_bytes=640)
    verify_trace(trace)
    verify_plan(problem, plan)
    verify_program(problem, program)


# ---- what cannot be read -------------------------------------------------------------------------

SMALL = (
    "trace boundary 1\n"
    "buffer 0 input 4 B\n"
    "value %0 on 0 float32 (1,) stride (1,)\n"
    "inputs %0\n"
    "op 0 forward f(%0)\n"
)


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "reason"),
    [
        ("trace", "plan", 1, 1, "expected 'trace', found 'plan boundary 1'"),
        ("boundary 1", "boundary x", 1, 16, "expected an integer, found 'x'"),
        ("boundary 1", "boundary 1 2", 1, 18, "expected the end of the line, found '2'"),
        ("buffer", "bufer", 2, 1, "expected buffer or value or op or donate or inputs"),
        ("input 4", "inputs 4", 2, 10, "expected input or param or state or activation or grad"),
        ("4 B", "4", 2, 17, "expected 'B'"),
        ("4 B", "4 KiB", 2, 18, "expected 'B', found 'KiB'"),
        ("(1,) stride", "1 stride", 3, 23, "expected a tuple of integers"),
        ("inputs %0", "inputs 0", 4, 8, "expected a value like %12, found '0'"),
        ("inputs %0", "inputs %0\ninputs %0", 5, 1, "a second line of inputs"),
        ("f(%0)", "f(%1)", 5, 16, "%1 is not a value of this trace"),
        ("f(%0)", "f(%0", 5, 18, "expected ',' or ')'"),
        ("f(%0)", "f(a=1, %0)", 5, 21, "expected a keyword argument"),
        ("f(%0)", "f((1 2))", 5, 19, "expected ',' or ')', found '2))'"),
        ("f(%0)", "f(nil)", 5, 16, "expected an argument, found 'nil)'"),
        ("f(%0)", 'f("\\x")', 5, 16, "not a JSON string"),
        ("f(%0)", "f() !odd", 5, 19, "expected random or mutates or collective or unrepeatable"),
        ("f(%0)", "f() @ here", 5, 20, "expected a quoted site, found 'here'"),
        ("0 input", "0input", 2, 8, "expected an integer, found '0input 4 B'"),
        ("value %0", "value % 0", 3, 7, "expected a value like %12, found '% 0 on"),
        ("f(%0)", "f(%007)", 5, 16, "%7 is not a value of this trace"),
        ("f(%0)", "f(%\N{ARABIC-INDIC DIGIT ZERO})", 5, 16, "expected an argument"),
        ("f(%0)", f"f({9 * '(' + 9 * ')'}x)", 5, 34, "expected ',' or ')', found 'x)'"),
        ("(1,) stride", f"({5000 * '9'},) stride", 3, 23, "expected a tuple of integers"),
        ("boundary 1", f"boundary {5000 * '9'}", 1, 16, "expected an integer, found '999"),
    ],
)  # fmt: skip
def test_what_a_trace_may_not_say(old: str, new: str, line: int, column: int, reason: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(SMALL.replace(old, new, 1), Trace)
    error = caught.value
    assert (error.line, error.column, error.reason[: len(reason)]) == (line, column, reason)


@pytest.mark.parametrize(
    ("text", "kind", "line", "column", "reason"),
    [
        ("", Plan, 1, 1, "expected a plan, found nothing"),
        ("# only a note", Program, 1, 1, "expected a program, found nothing"),
        ("plan\ngap 1 after 2 before 3 drop", Plan, 2, 24, "expected keep or offload or recompute"),
        ("plan\ngap 1 after 2 before 3 dead", Plan, 2, 28, "expected keep or offload or recompute"),
        ("plan\ngap 1 after 2 dead before 3 keep", Plan, 2, 15, "expected 'before', found 'dead"),
        ("profile measured\nop 1 0.5 s 3 B", Profile, 2, 4, "expected '0', found '1 0.5 s 3 B'"),
        ("profile measured\nop 0 fast s 3 B", Profile, 2, 6, "expected a number, found 'fast"),
        ("profile measured\nop 0 1.0 s 3 B or", Profile, 2, 18, "expected a number"),
        ("plan\nop 3 keep", Plan, 2, 6, "expected 'variant', found 'keep'"),
        ("hardware h", Hardware, 1, 11, "expected 'simplex'"),
        ("problem budget 1 B\nplan", Problem, 2, 1, "expected hardware or profile or trace"),
        ("problem budget 1 B\ntrace boundary 0", Problem, 1, 1, "this problem has no hardware"),
        ("problem budget 1 B\ntrace\ntrace", Problem, 3, 1, "a second trace"),
        ("program boundary 0\n1: compute free s0", Program, 2, 1, "expected '0', found '1: comp"),
        ("program boundary 0\n0: compute go 1", Program, 2, 12, "expected alloc or free or copy"),
        ("program boundary 0\n0: out copy s1 -> 2", Program, 2, 19, "expected a slot like s12"),
        ("program boundary 0\n0: compute free s0 after 0-1", Program, 2, 26, "expected what comes"),
        ("program boundary 0\n0: compute free s0 after", Program, 2, 25, "expected what comes"),
        ("program boundary 0\n0: compute run 0 ->", Program, 2, 20, "expected what comes"),
        ("program boundary 0\n0: compute run 0 donate", Program, 2, 24, "expected a pair of slots"),
        ("program boundary 0\narguments s3s4", Program, 2, 11, "expected the end of the line"),
        ("program boundary 0\n0: compute alloc s3after 0", Program, 2, 18, "expected a slot like"),
        ("profile measured\nop 0 0.5s 3 B", Profile, 2, 6, "expected a number, found '0.5s 3 B'"),
        ("timeline guessed", Timeline, 1, 10, "expected measured or estimated or simulated"),
    ],
)  # fmt: skip
def test_what_the_other_nouns_may_not_say(
    text: str, kind: type, line: int, column: int, reason: str
) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text, kind)
    error = caught.value
    assert (error.line, error.column, error.reason[: len(reason)]) == (line, column, reason)


def test_brackets_inside_brackets_have_an_end() -> None:
    before = sys.getrecursionlimit()  # hypothesis raises it
    sys.setrecursionlimit(len(inspect.stack(0)) + 600)
    try:
        with pytest.raises(ParseError, match=r"line 5, column .*: too many brackets"):
            parse(SMALL.replace("%0)", 5000 * "(" + 5000 * ")" + ")"), Trace)
    finally:
        sys.setrecursionlimit(before)


@given(st.data())
def test_a_damaged_text_parses_or_raises_parse_error(data: st.DataObject) -> None:
    text = to_text(small_problem())
    at = data.draw(st.integers(0, len(text) - 1))
    damage = data.draw(st.sampled_from(["", "x", " ", "\n", '"', "%99", "(", json.dumps("\n")]))
    with contextlib.suppress(ParseError):  # no other error may be raised
        parse(text[:at] + damage + text[at + 1 :], Problem)
