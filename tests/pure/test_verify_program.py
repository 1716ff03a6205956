"""The verifier refuses programs with a fault: each rule by hand, then faults at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Action, Alloc, Copy, Free, Instruction, Program, Run, Slot, Stream
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Donation, Trace
from outcore.ir.verify_program import verify_program
from outcore.lower import lower
from tests.pure.mutations import Tally, without_instruction
from tests.pure.strategies import small_hardware, small_problem
from tests.pure.test_lower import lowered, planned, run

# `small_trace` with `conv` (buffer 3) offloaded across the boundary and `curved` (5) recomputed.
PROGRAM = """
program boundary 14
slot s0 buffer 0 device 1024 B
slot s1 buffer 1 device 256 B
slot s2 buffer 2 device 256 B
slot s3 buffer 3 device 1024 B
slot s4 buffer 4 device 1024 B
slot s5 buffer 5 device 1024 B
slot s6 buffer 6 device 1024 B
slot s7 buffer 3 host 1024 B
slot s8 buffer 7 device 256 B
slot s9 buffer 8 device 256 B
slot s10 buffer 9 device 1024 B
slot s11 buffer 10 device 256 B
slot s12 buffer 5 device 1024 B
slot s13 buffer 11 device 1024 B
slot s14 buffer 12 device 1024 B
slot s15 buffer 3 device 1024 B
slot s16 buffer 13 device 256 B
arguments s0 s1 s2
tangents s9
results s0 s1 s2 s8 s11 s16
0: compute alloc s3
1: compute run 0 s0 s1 -> s3
2: compute alloc s4
3: compute run 1 s3 -> s4
4: compute alloc s5
5: compute run 2 s4 -> s5
6: compute alloc s6
7: compute run 3 s5 s3 -> s6
8: compute free s5
9: out alloc s7
10: out copy s3 -> s7 after 1
11: compute free s3 after 10
12: compute alloc s8
13: compute run 4 s6 s2 -> s8
14: compute alloc s10
15: compute alloc s11
16: compute run 5 s9 s6 s2 -> s10 s11
17: compute free s9
18: compute free s6
19: compute alloc s12
20: compute rerun 2 s4 -> s12
21: compute run 6 s10 s12 -> s13 donate s10:s13
22: compute free s12
23: compute alloc s14
24: compute run 7 s13 s4 -> s14
25: compute free s13
26: compute free s4
27: compute alloc s15
28: in copy s7 -> s15 after 27
29: in free s7
30: compute alloc s16
31: compute run 8 s14 s0 s15 s1 -> s16 after 28
32: compute free s14
33: compute free s15
"""


def edited(*edits: tuple[str, str]) -> Program:
    """The program of this file with pieces of its text replaced."""
    text = PROGRAM
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return parse(text, Program)


def inserted(program: Program, position: int, stream: Stream, action: Action) -> Program:
    """`program` with one more instruction at `position`, which waits for nothing."""

    def moved(edges: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(edge + (edge >= position) for edge in edges)

    body = [replace(x, after=moved(x.after), pace=moved(x.pace)) for x in program.body]
    body.insert(position, Instruction(action, stream))
    boundary = program.boundary + (position < program.boundary)
    return replace(program, body=tuple(body), boundary=boundary)


def removed(program: Program, position: int) -> Program:
    return list(without_instruction(program))[position]


def refused(program: Program, rule: str, where: str = "", problem: Problem | None = None) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_program(problem or small_problem(), program)
    error = caught.value
    assert error.noun == "program"
    assert rule in error.rule
    assert where in error.where


def test_the_program_of_this_file_is_valid_and_is_what_lowering_makes() -> None:
    verify_program(small_problem(), edited())
    plan = parse(
        "plan\ngap 3 after 3 before 8 offload host\ngap 5 after 3 before 6 recompute", Plan
    )
    program = lower(small_problem(budget_bytes=1), plan)
    assert replace(program, trace_digest="", plan_digest="") == edited()


LISTED = "every slot that is named is listed"
STREAM = "an instruction is on the stream of its kind and tier"
READY = "a slot is touched after its last write is done"


@pytest.mark.parametrize(
    ("old", "new", "where", "rule"),
    [
        # what is named exists
        ("slot s4 buffer 4", "slot s5 buffer 4", "slot 4", "ids index"),
        ("slot s4 buffer 4", "slot s4 buffer 44", "slot s4", "a slot is of a buffer of the trace"),
        ("slot s4 buffer 4", "slot s4 buffer -1", "slot s4", "a slot is of a buffer of the trace"),
        ("4 device 1024 B", "4 device 1023 B", "slot s4", "a slot is as large as its buffer"),
        ("host 1024 B", "host 1024 B at -1", "slot s7", "no offset is negative"),
        ("boundary 14", "boundary 35", "the boundary", "the boundary is the first position"),
        ("boundary 14", "boundary -1", "the boundary", "the boundary is the first position"),
        ("after 27", "after 28", "instruction 28", "an instruction waits for earlier ones"),
        ("after 27", "after -1", "instruction 28", "an instruction waits for earlier ones"),
        ("after 27", "after 27 pace 99", "instruction 28", "an instruction waits for earlier"),
        ("run 8", "run 9", "instruction 31", "a run is of an op of the trace"),
        ("alloc s3", "alloc s99", "instruction 0", LISTED),
        ("free s5", "free s99", "instruction 8", LISTED),
        ("copy s3 -> s7", "copy s99 -> s7", "instruction 10", LISTED),
        ("copy s3 -> s7", "copy s3 -> s99", "instruction 10", LISTED),
        ("run 4 s6 s2", "run 4 s6 s99", "instruction 13", LISTED),
        ("s6 s2 -> s8", "s6 s2 -> s99", "instruction 13", LISTED),
        ("donate s10:s13", "donate s10:s99", "instruction 21", LISTED),
        # the caller's slots
        ("arguments s0 s1 s2", "arguments s0 s1 s99", "arguments", LISTED),
        ("arguments s0 s1 s2", "arguments s0 s1", "arguments", "the arguments are those of the"),
        ("arguments s0 s1 s2", "arguments s0 s2 s1", "arguments", "the arguments are those of"),
        ("arguments s0 s1 s2", "arguments s0 s1 s2 s3", "arguments", "the arguments are those"),
        ("arguments s0 s1 s2", "arguments s0 s1 s2 s9", "arguments", "the arguments are those"),
        ("arguments s0 s1 s2", "arguments s0 s1 s7", "arguments", "the arguments are on the dev"),
        ("tangents s9", "tangents", "tangents", "the tangents are those of the trace"),
        ("tangents s9", "tangents s9 s9", "tangents", "the tangents are those of the trace"),
        ("s11 s16", "s11 s99", "results", LISTED),
        ("s11 s16", "s11", "results", "the results are those of the trace"),
        ("s11 s16", "s11 s16 s16", "results", "the results are those of the trace"),
        ("s11 s16", "s11 s16 s15", "results", "the results are those of the trace"),
        ("13 device 256 B", "13 host 256 B", "results", "the results are on the device"),
        # streams
        ("0: compute", "0: out", "instruction 0", STREAM),
        ("9: out", "9: compute", "instruction 9", STREAM),
        ("10: out", "10: in", "instruction 10", STREAM),
        ("11: compute", "11: in", "instruction 11", STREAM),
        ("28: in", "28: out", "instruction 28", STREAM),
        ("29: in", "29: out", "instruction 29", STREAM),
        ("31: compute", "31: in", "instruction 31", STREAM),
        # live when touched, written before read
        ("12: compute alloc s8", "12: compute alloc s6", "instruction 12", "allocated once"),
        ("27: compute alloc s15", "27: compute alloc s3", "instruction 27", "allocated once"),
        ("s14 s0 s15 s1", "s14 s0 s3 s1", "instruction 31", "is live when it is touched"),
        ("22: compute free s12", "22: compute free s10", "instruction 22", "is live when it is"),
        ("20: compute rerun 2 s4 -> s12", "20: compute free s4", "21", "written before it is read"),
        ("run 0 s0 s1 -> s3", "free s3", "instruction 1", "a slot is written before it is freed"),
        # hazards
        ("s15 after 27", "s15", "instruction 28", READY),
        ("s15 after 27", "s15 pace 27", "instruction 28", READY),
        ("s16 after 28", "s16", "instruction 31", READY),
        ("s7 after 1", "s7", "instruction 10", READY),
        ("s3 after 10", "s3", "instruction 11", "written, freed or donated after its reads"),
        ("s3 after 10", "s3 pace 10", "instruction 11", "written, freed or donated after its"),
        # copies
        ("s7 buffer 3", "s7 buffer 4", "instruction 10", "between two slots of one buffer"),
        # runs
        ("run 4 s6 s2", "run 4 s2 s6", "instruction 13", "slots of the op's buffers, in order"),
        ("-> s10 s11", "-> s11 s10", "instruction 16", "slots of the op's buffers, in order"),
        ("run 4", "run 5", "instruction 13", "each op runs once as the original, in order"),
        ("20: compute rerun 2", "20: compute run 2", "20", "each op runs once as the original"),
        ("5: compute run 2", "5: compute rerun 2", "5", "an op runs again after it ran"),
        # donations
        ("donate s10:s13", "donate s4:s13", "instruction 21", "donates what it reads to what it"),
        ("donate s10:s13", "donate s10:s14", "instruction 21", "donates what it reads to what it"),
        ("donate s10:s13", "donate s12:s13", "instruction 21", "the trace allows the donation"),
        ("11 device 1024 B", "11 device 2048 B", "21", "a slot is donated to one of its size"),
        ("donate s10:s13", "donate s10:s13 s10:s13", "21", "a slot is donated once"),
        # the ends of the two calls
        ("boundary 14", "boundary 13", "the boundary", "the forward call runs the forward ops"),
        ("32: compute free s14", "32: compute free s16", "the end", "nothing but the results"),
    ],
)  # fmt: skip
def test_each_rule_of_a_program(old: str, new: str, where: str, rule: str) -> None:
    refused(edited((old, new)), rule, where)


def test_tangents_come_with_the_backward_call() -> None:
    """Filled before the forward call they would be counted, and waited for, too early."""
    early = edited(("arguments s0 s1 s2", "arguments s0 s1 s2 s9"), ("tangents s9", "tangents"))
    refused(early, "the arguments are those of the trace", "arguments")


def test_a_leak_is_no_result() -> None:
    leaking = removed(edited(), 33)
    refused(leaking, "nothing but the results is left", "the end")
    listed = replace(leaking, results=(*leaking.results, 15))
    refused(listed, "the results are those of the trace", "results")


def test_a_copy_goes_to_another_tier() -> None:
    on_device = edited(
        ("s7 buffer 3 host", "s7 buffer 3 device"), ("9: out alloc", "9: compute alloc")
    )
    refused(on_device, "a copy is between two tiers", "instruction 10")


def test_a_run_finds_its_slots_on_the_device() -> None:
    on_disk = edited(
        ("s15 buffer 3 device", "s15 buffer 3 disk"), ("27: compute alloc", "27: out alloc")
    )
    refused(on_disk, "a run finds its slots on the device", "instruction 31")


def test_a_slot_is_written_once() -> None:
    again = Run(2, (4,), (12,), again=True)
    refused(inserted(edited(), 21, Stream.COMPUTE, again), "a slot is written once", "21")
    refused(inserted(edited(), 29, Stream.IN, Copy(7, 15)), "a slot is written once", "29")


def test_only_repeatable_ops_run_again() -> None:
    again = Run(8, (14, 0, 15, 1), (16,), again=True)
    program = inserted(edited(), 32, Stream.COMPUTE, again)
    refused(program, "only an op that may run again does", "instruction 32")


def test_every_op_runs() -> None:
    cut = replace(edited(), body=edited().body[:27])
    refused(cut, "each op runs once as the original, in order", "the end")


def test_what_a_call_returns_is_there() -> None:
    program = inserted(edited(), 14, Stream.COMPUTE, Free(8))
    program = replace(program, boundary=15)
    refused(program, "what a call returns is there at its end", "the boundary")
    refused(inserted(edited(), 34, Stream.COMPUTE, Free(16)), "is there at its end", "the end")


def test_what_a_call_returns_is_written_as_far_as_compute_knows() -> None:
    """The last result leaves and comes back, and nothing waits for that."""
    text = PROGRAM.replace("s11 s16\n", "s11 s18\n").replace(
        "arguments",
        "slot s17 buffer 13 host 256 B at 1024\nslot s18 buffer 13 device 256 B\narguments",
    )
    text += (
        "34: out alloc s17\n"
        "35: out copy s16 -> s17 after 31\n"
        "36: compute free s16 after 35\n"
        "37: compute alloc s18\n"
        "38: in copy s17 -> s18 after 35 37\n"
        "39: in free s17\n"
    )
    refused(parse(text, Program), "what a call returns is written by its end", "the end")


# ---- donations -----------------------------------------------------------------------------------


def with_donation(op: int, source: int, target: int) -> Problem:
    problem = small_problem()
    trace = problem.trace
    donations = (*trace.donations, Donation(op, source, target))
    return replace(problem, trace=replace(trace, donations=donations))


def test_a_donation_waits_for_reads_of_what_it_overwrites() -> None:
    """Buffer 9 is on its way to the host when op 6 writes its result over it."""
    program = replace(edited(), slots=(*edited().slots, Slot(17, 9, Tier.HOST, 1024, 1024)))
    program = inserted(program, 17, Stream.OUT, Copy(10, 17))
    program = inserted(program, 17, Stream.OUT, Alloc(17))
    late = list(program.body)
    late[18] = replace(late[18], after=(16,))
    program = replace(program, body=tuple(late))
    refused(program, "a slot is written, freed or donated after its reads are done", "23")


def test_what_takes_donated_memory_has_none_of_its_own() -> None:
    program = inserted(edited(), 19, Stream.COMPUTE, Alloc(13))
    refused(program, "a slot is allocated once", "instruction 22")


def test_what_crosses_to_the_backward_call_is_not_overwritten() -> None:
    """A second backward over the same forward reads `dropped` again."""
    problem = with_donation(7, 4, 14)
    donated = removed(removed(edited(), 26), 23)
    body = list(donated.body)
    rerun = body[23].action
    assert isinstance(rerun, Run)
    body[23] = replace(body[23], action=replace(rerun, donate=((4, 14),)))
    program = replace(donated, body=tuple(body))
    refused(program, "what crosses to the backward call is not overwritten", "23", problem)
    kept = lower(problem, Plan(()))
    assert all(
        not x.action.donate for x in kept.body if isinstance(x.action, Run) and x.action.op == 7
    )


# ---- rooms of the outer tiers --------------------------------------------------------------------

# `conv` leaves between ops 1 and 3 and `curved` between ops 3 and 6, one after the other.
ROOMS = "plan\ngap 3 after 1 before 3 offload host\ngap 5 after 3 before 6 offload host"


def rooms(*edits: tuple[str, str]) -> Program:
    text = to_text(lower(small_problem(budget_bytes=1), parse(ROOMS, Plan)))
    for old, new in edits:
        assert old in text, text
        text = text.replace(old, new, 1)
    return parse(text, Program)


def test_a_room_is_used_again_only_after_it_is_free() -> None:
    program = rooms()
    first, second = (s for s in program.slots if s.tier is Tier.HOST)
    assert (first.offset, second.offset) == (0, 0)
    at = next(i for i, x in enumerate(program.body) if x.action == Alloc(second.id))
    body = list(program.body)
    body[at] = replace(body[at], after=())
    rule = "a room is used again after its last owner is freed"
    refused(replace(program, body=tuple(body)), rule, f"instruction {at}")


def test_live_slots_share_no_bytes() -> None:
    program = rooms()
    first, second = (s for s in program.slots if s.tier is Tier.HOST)
    at = next(i for i, x in enumerate(program.body) if x.action == Alloc(second.id))
    early = next(i for i, x in enumerate(program.body) if x.action == Free(first.id))
    program = removed(program, early)
    refused(program, "live slots of a tier share no bytes", f"instruction {at - 1}")


def test_what_crosses_keeps_its_room() -> None:
    """A second backward over the same forward fetches `conv` again."""
    slots = (*edited().slots, Slot(17, 13, Tier.HOST, 256, 512))
    program = replace(edited(), slots=slots)
    program = inserted(program, 34, Stream.OUT, Alloc(17))
    refused(program, "what crosses to the backward call keeps its room", "instruction 34")


# ---- mutations -----------------------------------------------------------------------------------

MUTATING = """
trace boundary 3
buffer 0 state 4 B pinned
buffer 1 activation 4 B
buffer 2 activation 4 B
buffer 3 grad 4 B
buffer 4 grad 4 B
value %0 on 0 float32 (1,) stride (1,)
value %1 on 1 float32 (1,) stride (1,)
value %2 on 2 float32 (1,) stride (1,)
value %3 on 3 float32 (1,) stride (1,)
value %4 on 4 float32 (1,) stride (1,)
inputs %0
op 0 forward f(%0) -> %1
op 1 forward g(%1) -> %2
op 2 forward bump_(%0) -> _ !mutates
outputs %2
tangents %3
op 3 backward h(%3, %1) -> %4
gradients %4
"""
RERUN = """
program boundary 6
slot s0 buffer 0 device 4 B
slot s1 buffer 1 device 4 B
slot s2 buffer 2 device 4 B
slot s3 buffer 3 device 4 B
slot s4 buffer 1 device 4 B
slot s5 buffer 4 device 4 B
arguments s0
tangents s3
results s0 s2 s5
0: compute alloc s1
1: compute run 0 s0 -> s1
2: compute alloc s2
3: compute run 1 s1 -> s2
4: compute free s1
5: compute run 2 s0
6: compute alloc s4
7: compute rerun 0 s0 -> s4
8: compute alloc s5
9: compute run 3 s3 s4 -> s5
10: compute free s3
11: compute free s4
"""
SNAPSHOT = """
program boundary 9
slot s0 buffer 0 device 4 B
slot s1 buffer 1 device 4 B
slot s2 buffer 2 device 4 B
slot s3 buffer 3 device 4 B
slot s4 buffer 1 device 4 B
slot s5 buffer 4 device 4 B
slot s6 buffer 0 host 4 B
slot s7 buffer 0 device 4 B
arguments s0
tangents s3
results s0 s2 s5
0: out alloc s6
1: out copy s0 -> s6
2: compute alloc s1
3: compute run 0 s0 -> s1
4: compute alloc s2
5: compute run 1 s1 -> s2
6: compute free s1
7: compute run 2 s0 after 1
8: compute alloc s7
9: in copy s6 -> s7 after 1 8
10: in free s6
11: compute alloc s4
12: compute rerun 0 s7 -> s4 after 9
13: compute alloc s5
14: compute run 3 s3 s4 -> s5
15: compute free s3
16: compute free s4
17: compute free s7
"""


def mutating() -> Problem:
    profile = Profile((1e-3,) * 4, (0,) * 4, Source.ESTIMATED)
    return Problem(parse(MUTATING, Trace), profile, small_hardware(), 10000)


def test_a_rerun_does_not_read_what_was_mutated_since() -> None:
    rule = "a run reads what the original run reads, mutations included"
    refused(parse(RERUN, Program), rule, "instruction 7", mutating())


def test_a_rerun_may_read_a_copy_from_before_the_mutation() -> None:
    verify_program(mutating(), parse(SNAPSHOT, Program))


def test_only_a_copy_from_before_the_mutation_gives_the_plain_results() -> None:
    """`interpret` sees what an op writes in place, so the rule is no formality."""
    problem = mutating()
    plain = run(problem, lower(problem, Plan(())))
    assert run(problem, parse(SNAPSHOT, Program)) == plain
    assert run(problem, parse(RERUN, Program)) != plain


def test_a_mutation_waits_for_the_copy_of_what_it_changes() -> None:
    program = parse(SNAPSHOT.replace("run 2 s0 after 1", "run 2 s0"), Program)
    rule = "a slot is written, freed or donated after its reads are done"
    refused(program, rule, "instruction 7", mutating())


def test_the_caller_keeps_what_was_mutated() -> None:
    text = SNAPSHOT.replace("results s0", "results s7").replace(
        "17: compute free s7", "17: compute free s0"
    )
    rule = "what a call returns has seen every mutation"
    refused(parse(text, Program), rule, "the end", mutating())


# ---- messages ------------------------------------------------------------------------------------


def test_a_message_names_rule_place_and_finding_and_shows_the_instructions() -> None:
    with pytest.raises(VerifyError) as caught:
        verify_program(small_problem(), edited(("s16 after 28", "s16")))
    assert str(caught.value) == (
        'program breaks the rule "a slot is touched after its last write is done" '
        "at instruction 31: of slot s15, 28 need not be done by then"
    )
    excerpt = (
        "  28: in copy s7 -> s15 after 27\n"
        "  29: in free s7\n"
        "  30: compute alloc s16\n"
        "> 31: compute run 8 s14 s0 s15 s1 -> s16\n"
        "  32: compute free s14\n"
        "  33: compute free s15"
    )
    assert caught.value.__notes__ == [excerpt]


# ---- faults at random ----------------------------------------------------------------------------

tally = Tally()


@given(planned())
@settings(max_examples=40)
def test_lost_instructions_and_edges_are_caught(case) -> None:
    problem, plan = case
    program = lowered(problem, plan)
    if program is None or len(program.body) > 120:
        return
    one = Tally()
    one.add(problem, program)
    assert one.edges_harmful_missed == 0
    assert one.instructions_caught >= 0.95 * one.instructions
    for field in Tally.__dataclass_fields__:
        setattr(tally, field, getattr(tally, field) + getattr(one, field))


def test_the_faults_tried_were_real() -> None:
    assert tally.edges_harmful > 20
    assert tally.instructions > 500
