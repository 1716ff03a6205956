"""verify_program: each rule, by hand-made programs with a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Alloc, Free, Program, Run
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Donation, Trace
from outcore.ir.verify_program import verify_program
from outcore.lower import lower
from tests.conftest import CASES
from tests.pure.mutations import without_instruction
from tests.pure.strategies import small_hardware, small_problem
from tests.pure.test_lower import run

# `small_trace` with `conv` (buffer 3) offloaded across the boundary and `curved` (5) recomputed.
PLAN = "plan\ngap 3 after 3 before 8 offload host\ngap 5 after 3 before 6 recompute"
PROGRAM = parse((CASES / "ir/program.txt").read_text(encoding="utf-8"), Program)

# Op 2 changes the argument of op 0, which runs again on a copy from before that.
MUTATING = parse((CASES / "ir/mutating_trace.txt").read_text(encoding="utf-8"), Trace)
SNAPSHOT = parse((CASES / "ir/snapshot_program.txt").read_text(encoding="utf-8"), Program)
RERUN_OF_CHANGED = "rerun 0 s7 => rerun 0 s0"


def edited(program: Program, *edits: str) -> Program:
    """`program` with text replaced (`old => new`), inserted (`+7 in free s4`) or removed (`-7`)."""
    for edit in edits:
        old, arrow, new = edit.partition(" => ")
        position, _, instruction = edit[1:].partition(" ")
        if arrow:
            text = to_text(program)
            assert old in text, edit
            program = parse(text.replace(old, new, 1), Program)
        elif edit[0] == "+":
            program = inserted(program, int(position), instruction)
        else:
            program = list(without_instruction(program))[int(position)]
    return program


def inserted(program: Program, position: int, text: str) -> Program:
    """`program` with one more instruction; waits still name the same instructions."""

    def moved(edges: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(edge + (edge >= position) for edge in edges)

    [new] = parse(f"program boundary 0\narguments\ntangents\nresults\n0: {text}", Program).body
    body = [replace(x, after=moved(x.after), pace=moved(x.pace)) for x in program.body]
    body.insert(position, new)
    boundary = program.boundary + (position < program.boundary)
    return replace(program, body=tuple(body), boundary=boundary)


def refused(program: Program, where: str, rule: str, problem: Problem | None = None) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_program(problem or small_problem(), program)
    assert caught.value.noun == "program"
    assert rule in caught.value.rule
    assert where in caught.value.where


def test_the_program_of_this_file_is_valid_and_is_what_lowering_makes(golden) -> None:
    verify_program(small_problem(), PROGRAM)
    made = lower(small_problem(budget_bytes=1), parse(PLAN, Plan))
    golden(to_text(replace(made, trace_digest="", plan_digest="")), "ir/program")


LISTED = "every slot that is named is listed"
ARGUMENTS, TANGENTS, RESULTS = (
    f"the {name} are those of the trace" for name in ("arguments", "tangents", "results")
)
STREAM = "an instruction is on the stream of its kind and tier"
READY = "a slot is touched after its last write is done"
DONE = "a slot is written, freed or donated after its reads are done"
LIVE = "is live when it is touched"
ONCE = "each op runs once as the original, in order"
ORDER = "slots of the op's buffers, in order"
DONATES = "donates what it reads to what it"
AT_THE_END = "what a call returns is there at its end"


@pytest.mark.parametrize(
    ("where", "rule", "edits"),
    [
        # what is named exists
        ("slot 4", "ids index", ["slot s4 buffer 4 => slot s5 buffer 4"]),
        ("slot s4", "is of a buffer of the trace", ["slot s4 buffer 4 => slot s4 buffer 44"]),
        ("slot s4", "is of a buffer of the trace", ["slot s4 buffer 4 => slot s4 buffer -1"]),
        ("slot s4", "is as large as its buffer", ["4 device 1024 B => 4 device 1023 B"]),
        ("slot s7", "no offset is negative", ["host 1024 B => host 1024 B at -1"]),
        ("the boundary", "the first position", ["boundary 14 => boundary 35"]),
        ("the boundary", "the first position", ["boundary 14 => boundary -1"]),
        ("instruction 28", "waits for earlier ones", ["after 27 => after 28"]),
        ("instruction 28", "waits for earlier ones", ["after 27 => after -1"]),
        ("instruction 28", "waits for earlier ones", ["after 27 => after 27 pace 99"]),
        ("instruction 31", "a run is of an op of the trace", ["run 8 => run 9"]),
        ("instruction 0", LISTED, ["alloc s3 => alloc s99"]),
        ("instruction 8", LISTED, ["free s5 => free s99"]),
        ("instruction 10", LISTED, ["copy s3 -> s7 => copy s99 -> s7"]),
        ("instruction 10", LISTED, ["copy s3 -> s7 => copy s3 -> s99"]),
        ("instruction 13", LISTED, ["run 4 s6 s2 => run 4 s6 s99"]),
        ("instruction 13", LISTED, ["s6 s2 -> s8 => s6 s2 -> s99"]),
        ("instruction 21", LISTED, ["donate s10:s13 => donate s10:s99"]),
        # the caller's slots
        ("arguments", LISTED, ["arguments s0 s1 s2 => arguments s0 s1 s99"]),
        ("arguments", ARGUMENTS, ["arguments s0 s1 s2 => arguments s0 s1"]),
        ("arguments", ARGUMENTS, ["arguments s0 s1 s2 => arguments s0 s2 s1"]),
        ("arguments", ARGUMENTS, ["arguments s0 s1 s2 => arguments s0 s1 s2 s3"]),
        ("arguments", ARGUMENTS, ["arguments s0 s1 s2 => arguments s0 s1 s2 s9"]),
        # filled before the forward call, tangents would be counted, and waited for, too early
        ("arguments", ARGUMENTS, ["ts s0 s1 s2 => ts s0 s1 s2 s9", "tangents s9 => tangents"]),
        ("arguments", "the arguments are on the dev", ["ts s0 s1 s2 => ts s0 s1 s7"]),
        ("tangents", TANGENTS, ["tangents s9 => tangents"]),
        ("tangents", TANGENTS, ["tangents s9 => tangents s9 s9"]),
        ("results", LISTED, ["s11 s16 => s11 s99"]),
        ("results", RESULTS, ["s11 s16 => s11"]),
        ("results", RESULTS, ["s11 s16 => s11 s16 s16"]),
        ("results", RESULTS, ["s11 s16 => s11 s16 s15"]),
        ("results", RESULTS, ["s11 s16 => s11 s16 s15", "-33"]),
        ("results", "the results are on the device", ["13 device 256 B => 13 host 256 B"]),
        # streams
        ("instruction 0", STREAM, ["0: compute => 0: out"]),
        ("instruction 9", STREAM, ["9: out => 9: compute"]),
        ("instruction 10", STREAM, ["10: out => 10: in"]),
        ("instruction 11", STREAM, ["11: compute => 11: in"]),
        ("instruction 28", STREAM, ["28: in => 28: out"]),
        ("instruction 29", STREAM, ["29: in => 29: out"]),
        ("instruction 31", STREAM, ["31: compute => 31: in"]),
        # live when touched, written before read, written once
        ("instruction 12", "allocated once", ["12: compute alloc s8 => 12: compute alloc s6"]),
        ("instruction 27", "allocated once", ["27: compute alloc s15 => 27: compute alloc s3"]),
        ("instruction 31", LIVE, ["s14 s0 s15 s1 => s14 s0 s3 s1"]),
        ("instruction 22", LIVE, ["22: compute free s12 => 22: compute free s10"]),
        ("21", "written before it is read", ["rerun 2 s4 -> s12 => free s4"]),
        ("instruction 1", "a slot is written before it is freed", ["run 0 s0 s1 -> s3 => free s3"]),
        ("21", "a slot is written once", ["+21 compute rerun 2 s4 -> s12"]),
        ("29", "a slot is written once", ["+29 in copy s7 -> s15"]),
        # hazards
        ("instruction 28", READY, ["s15 after 27 => s15"]),
        ("instruction 28", READY, ["s15 after 27 => s15 pace 27"]),
        ("instruction 31", READY, ["s16 after 28 => s16"]),
        ("instruction 10", READY, ["s7 after 1 => s7"]),
        ("instruction 11", DONE, ["s3 after 10 => s3"]),
        ("instruction 11", DONE, ["s3 after 10 => s3 pace 10"]),
        # copies
        ("instruction 10", "between two slots of one buffer", ["s7 buffer 3 => s7 buffer 4"]),
        ("instruction 10", "between the device and another tier",
         ["3 host => 3 device", "9: out => 9: compute"]),
        ("instruction 28", "between the device and another tier",
         ["s15 buffer 3 device => s15 buffer 3 disk", "27: compute => 27: out"]),
        # runs
        ("instruction 13", ORDER, ["run 4 s6 s2 => run 4 s2 s6"]),
        ("instruction 16", ORDER, ["-> s10 s11 => -> s11 s10"]),
        ("instruction 13", ONCE, ["run 4 => run 5"]),
        ("20", ONCE, ["20: compute rerun 2 => 20: compute run 2"]),
        ("the end", ONCE, [f"-{n}" for n in range(33, 26, -1)]),
        ("5", "an op runs again after it ran", ["5: compute run 2 => 5: compute rerun 2"]),
        ("32", "only an op that may run again does", ["+32 compute rerun 8 s14 s0 s15 s1 -> s16"]),
        ("instruction 5", "of a variant that the profile has", ["run 2 => run 2 variant 1"]),
        ("instruction 5", "of a variant that the profile has", ["run 2 => run 2 variant -1"]),
        ("24", "a run finds its slots on the device",
         ["s14 buffer 12 device => s14 buffer 12 disk", "23: compute => 23: out"]),
        # donations
        ("instruction 21", DONATES, ["donate s10:s13 => donate s4:s13"]),
        ("instruction 21", DONATES, ["donate s10:s13 => donate s10:s14"]),
        ("instruction 21", "the trace allows the donation", ["donate s10:s13 => donate s12:s13"]),
        ("21", "a slot is donated to one of its size", ["11 device 1024 B => 11 device 2048 B"]),
        ("21", "a slot is donated once", ["donate s10:s13 => donate s10:s13 s10:s13"]),
        # a slot that takes over donated memory is not allocated
        ("instruction 22", "a slot is allocated once", ["+19 compute alloc s13"]),
        # buffer 9 is on its way to the host when op 6 writes its result over it
        ("23", DONE, ["arguments => slot s17 buffer 9 host 1024 B at 1024\narguments",
                      "+17 out alloc s17", "+18 out copy s10 -> s17 after 16"]),
        # the ends of the two calls
        ("the boundary", "the forward call runs the forward ops", ["boundary 14 => boundary 13"]),
        ("the boundary", AT_THE_END, ["+14 compute free s8", "boundary 14 => boundary 15"]),
        ("the end", AT_THE_END, ["+34 compute free s16"]),
        ("the end", "nothing but the results", ["32: compute free s14 => 32: compute free s16"]),
        ("the end", "nothing but the results", ["-33"]),
        # a second backward over the same forward fetches `conv` again
        ("34", "what crosses to the backward call keeps its room",
         ["arguments => slot s17 buffer 13 host 256 B at 512\narguments", "+34 out alloc s17"]),
        # the last result is copied out and back, and nothing waits for the copy back
        ("the end", "what a call returns is written by its end",
         ["arguments => slot s17 buffer 13 host 256 B at 1024\narguments",
          "arguments => slot s18 buffer 13 device 256 B\narguments",
          "s11 s16 => s11 s18",
          "+34 out alloc s17", "+35 out copy s16 -> s17 after 31", "+36 compute free s16 after 35",
          "+37 compute alloc s18", "+38 in copy s17 -> s18 after 35 37", "+39 in free s17"]),
    ],
)  # fmt: skip
def test_each_rule_of_a_program(where: str, rule: str, edits: list[str]) -> None:
    refused(edited(PROGRAM, *edits), where, rule)


def test_all_runs_of_an_op_are_of_one_variant() -> None:
    problem = small_problem()
    profile = replace(problem.profile, alternatives=((2, (Cost(5e-4, 4096),)),))
    problem = replace(problem, profile=profile)
    first, again = ": compute run 2 => : compute run 2 variant 1", "rerun 2 => rerun 2 variant 1"
    verify_program(problem, edited(PROGRAM, first, again))
    for edit in (first, again):
        refused(edited(PROGRAM, edit), "20", "all runs of an op are of one variant", problem)


def test_what_crosses_to_the_backward_call_is_not_overwritten() -> None:
    """A second backward over the same forward reads `dropped` again."""
    problem = small_problem()
    donations = (*problem.trace.donations, Donation(7, 4, 14))
    problem = replace(problem, trace=replace(problem.trace, donations=donations))
    program = edited(PROGRAM, "-26", "-23", "s13 s4 -> s14 => s13 s4 -> s14 donate s4:s14")
    refused(program, "23", "what crosses to the backward call is not overwritten", problem)
    runs = [x.action for x in lower(problem, Plan(())).body if isinstance(x.action, Run)]
    assert [action.op for action in runs if action.donate] == [6]


def test_bytes_of_an_outer_tier_have_one_owner_at_a_time() -> None:
    """`conv` leaves between ops 1 and 3 and `curved` between ops 3 and 6, one after the other."""
    plan = "plan\ngap 3 after 1 before 3 offload host\ngap 5 after 3 before 6 offload host"
    program = lower(small_problem(budget_bytes=1), parse(plan, Plan))
    first, second = (s for s in program.slots if s.tier is Tier.HOST)
    assert (first.offset, second.offset) == (0, 0)
    actions = [x.action for x in program.body]
    freed, taken = actions.index(Free(first.id)), actions.index(Alloc(second.id))
    body = list(program.body)
    body[taken] = replace(body[taken], after=())
    rule = "a room is used again after its last owner is freed"
    refused(replace(program, body=tuple(body)), f"instruction {taken}", rule)
    rule = "live slots of a tier share no bytes"
    refused(edited(program, f"-{freed}"), f"instruction {taken - 1}", rule)


# ---- mutations -----------------------------------------------------------------------------------


def mutating() -> Problem:
    profile = Profile((1e-3,) * 4, (0,) * 4, Source.ESTIMATED)
    return Problem(MUTATING, profile, small_hardware(), 10000)


@pytest.mark.parametrize(
    ("where", "rule", "edits"),
    [
        ("instruction 12", "reads what the original run reads, mutations", [RERUN_OF_CHANGED]),
        ("instruction 7", DONE, ["run 2 s0 after 1 => run 2 s0"]),
        ("results", "the memory of the caller", ["results s0 => results s7", "free s7 => free s0"]),
    ],
)
def test_each_rule_of_a_mutation(where: str, rule: str, edits: list[str]) -> None:
    refused(edited(SNAPSHOT, *edits), where, rule, mutating())


def test_what_is_returned_has_seen_every_mutation() -> None:
    problem = mutating()
    first, *others = problem.trace.buffers
    trace = replace(problem.trace, buffers=(replace(first, borrowed=False), *others))
    program = edited(SNAPSHOT, "results s0 => results s7", "free s7 => free s0")
    refused(program, "the end", "has seen every mutation", replace(problem, trace=trace))


def test_a_copy_is_over_a_link_of_the_machine() -> None:
    problem = small_problem()
    links = tuple(link for link in problem.hardware.links if Tier.HOST not in link)
    hardware = replace(problem.hardware, links=links)
    rule = "a copy is over a link of the machine"
    refused(PROGRAM, "instruction 10", rule, replace(problem, hardware=hardware))


def test_only_a_copy_from_before_the_mutation_gives_the_plain_results() -> None:
    """`interpret` runs in-place writes, so it shows that breaking the rule changes results."""
    problem = mutating()
    verify_program(problem, SNAPSHOT)
    plain = run(problem, lower(problem, Plan(())))
    assert run(problem, SNAPSHOT) == plain
    assert run(problem, edited(SNAPSHOT, RERUN_OF_CHANGED)) != plain


# ---- messages ------------------------------------------------------------------------------------


def test_a_message_names_rule_place_and_finding_and_shows_the_instructions() -> None:
    with pytest.raises(VerifyError) as caught:
        verify_program(small_problem(), edited(PROGRAM, "s16 after 28 => s16"))
    assert str(caught.value) == (
        'program breaks the rule "a slot is touched after its last write is done" '
        "at instruction 31: of slot s15, 28 need not be done by then"
    )
    assert caught.value.__notes__[0].splitlines() == [
        "  28: in copy s7 -> s15 after 27",
        "  29: in free s7",
        "  30: compute alloc s16",
        "> 31: compute run 8 s14 s0 s15 s1 -> s16",
        "  32: compute free s14",
        "  33: compute free s15",
    ]
