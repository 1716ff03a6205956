"""memory: the bytes that a program holds at each position, peaks, limits, and the pause."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outcore.ir.hardware import Tier
from outcore.ir.memory import (
    Ahead,
    Peak,
    ahead,
    crossing_bytes,
    extent_bytes,
    fits,
    held_bytes,
    pause_bytes,
    peak,
    private_bytes,
    reread_bytes,
    retained_bytes,
    tier_bytes,
)
from outcore.ir.plan import KEEP_ALL, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Alloc, Free, Instruction, Program, Run, Slot, Stream
from outcore.ir.text import parse
from outcore.ir.totals import resident_bytes
from outcore.ir.trace import Donation, Phase, Ref, Role, Trace
from outcore.ir.verify import verify_trace
from outcore.ir.verify_program import verify_program
from outcore.lower import lower
from outcore.runtime.budget.whole_steps import LATEST, WholeSteps
from outcore.runtime.graphs.calls import whole
from tests.pure.building import TraceBuilder, small_problem
from tests.pure.strategies import planned, problems, small_hardware

TRACE = """
trace boundary 1
buffer 0 input 10 B borrowed
buffer 1 activation 100 B
buffer 2 grad 1000 B
buffer 3 grad 2 B
value %0 on 0 uint8 (10,) stride (1,)
value %1 on 1 uint8 (100,) stride (1,)
value %2 on 2 uint8 (1000,) stride (1,)
value %3 on 3 uint8 (2,) stride (1,)
inputs %0
op 0 forward f(%0) -> %1
outputs none
tangents %2
op 1 backward g(%1, %2) -> %3
gradients %3
"""
PROGRAM = """
program boundary 5
slot s0 buffer 0 device 10 B
slot s1 buffer 1 device 100 B
slot s2 buffer 1 host 100 B at 300
slot s3 buffer 1 device 128 B
slot s4 buffer 2 device 1000 B
slot s5 buffer 3 device 2 B
arguments s0
tangents s4
results s0 s5
0: compute alloc s1
1: compute run 0 s0 -> s1
2: out alloc s2
3: out copy s1 -> s2 after 1
4: compute free s1 after 3
5: compute alloc s3
6: in copy s2 -> s3 after 3 5
7: in free s2
8: compute alloc s5
9: compute run 1 s3 s4 -> s5 after 6
10: compute free s3
11: compute free s4
"""
#           0    1    2    3    4     5     6     7     8     9    10    11
DEVICE = [110, 150, 110, 110, 110, 1138, 1138, 1138, 1140, 1147, 1140, 1012]
HOST = [0, 0, 100, 100, 100, 100, 100, 100, 0, 0, 0, 0]


def problem(budget_bytes: int = 2000, **changes: int) -> Problem:
    profile = Profile((1e-3, 1e-3), (40, 7), Source.ESTIMATED)
    return Problem(parse(TRACE, Trace), profile, small_hardware(), budget_bytes, **changes)


def program() -> Program:
    return parse(PROGRAM, Program)


def test_the_program_of_this_file_is_valid() -> None:
    verify_trace(problem().trace)
    verify_program(problem(), program())


def test_device_bytes_count_slots_arguments_tangents_and_workspace() -> None:
    assert list(held_bytes(problem(), program(), Tier.DEVICE)) == DEVICE


def test_a_slot_counts_at_the_position_that_frees_it() -> None:
    assert list(held_bytes(problem(), program(), Tier.HOST)) == HOST
    assert set(held_bytes(problem(), program(), Tier.DISK)) == {0}


def test_outside_bytes_count_on_the_device_all_the_time() -> None:
    outside = problem(outside_bytes=5000)
    assert list(held_bytes(outside, program(), Tier.DEVICE)) == [n + 5000 for n in DEVICE]
    assert list(held_bytes(outside, program(), Tier.HOST)) == HOST


@pytest.mark.parametrize(("between", "at_boundary"), [(1, 1138), (128, 1138), (129, 1139)])
def test_between_bytes_count_once_at_the_boundary(between: int, at_boundary: int) -> None:
    """The larger of the position's own bytes and 10 + 1000 B (the pause) + `between_bytes`."""
    held = held_bytes(problem(between_bytes=between), program(), Tier.DEVICE)
    assert list(held) == [*DEVICE[:5], at_boundary, *DEVICE[6:]]


def test_peak_names_the_first_position_of_the_most_bytes() -> None:
    assert peak(problem(), program(), Tier.DEVICE) == Peak(1147, 9)
    assert peak(problem(), program(), Tier.HOST) == Peak(100, 2)
    assert peak(problem(), program(), Tier.DISK) == Peak(0, 0)
    assert peak(problem(), Program((), (), 0, (), (), ()), Tier.DEVICE) == Peak(0, 0)


def test_the_extent_of_an_outer_tier_reaches_to_its_furthest_slot() -> None:
    assert extent_bytes(program(), Tier.HOST) == 400
    assert extent_bytes(program(), Tier.DISK) == 0
    assert tier_bytes(problem(), program(), Tier.HOST) == 400
    assert tier_bytes(problem(), program(), Tier.DEVICE) == 1147


def test_a_donated_slot_takes_no_more_memory() -> None:
    donating = parse(
        "program boundary 3\n"
        "slot s0 buffer 2 device 1000 B\n"
        "slot s1 buffer 2 device 1000 B\n"
        "0: compute alloc s0\n"
        "1: compute run 0 s0 -> s1 donate s0:s1\n"
        "2: compute free s1",
        Program,
    )
    assert held_bytes(problem(), donating, Tier.DEVICE) == (1000, 1040, 1000)


def test_memory_of_an_argument_that_a_result_took_over_crosses() -> None:
    t = TraceBuilder()
    x = t.new(4, Role.INPUT)
    kept, out, tangent, grad = (t.new(4, Role.ACTIVATION) for _ in range(4))
    t.donations.append(Donation(t.op("relu", (Ref(x),), (kept,)), x, kept))
    t.op("g", (Ref(kept),), (out,))
    t.op("b", (Ref(tangent), Ref(kept)), (grad,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(out),), [tangent], (Ref(grad),))
    profile = Profile((1.0,) * 3, (0,) * 3, Source.ESTIMATED)
    program = lower(Problem(trace, profile, small_hardware(), 1000), KEEP_ALL)
    assert program.body[0].action.donate
    assert crossing_bytes(program) == 32
    assert private_bytes(trace, program) == 16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budget_bytes": 1147}, True),
        ({"budget_bytes": 1146}, False),
        ({"budget_bytes": 1147, "outside_bytes": 1}, False),
        ({"budget_bytes": 1147, "between_bytes": 137}, True),
        ({"budget_bytes": 1147, "between_bytes": 138}, False),
        ({"host_budget_bytes": 400}, True),
        ({"host_budget_bytes": 399}, False),
        ({"disk_budget_bytes": 0}, True),
    ],
)
def test_fits_holds_every_tier_to_its_limit(changes: dict[str, int], expected: bool) -> None:
    assert fits(problem(**changes), program()) is expected


def test_without_a_budget_the_hardware_is_the_limit() -> None:
    small = dataclasses.replace(small_hardware(), capacity_bytes=((Tier.HOST, 399),))
    assert not fits(dataclasses.replace(problem(), hardware=small), program())


sizes = st.integers(0, 1000)


@given(st.lists(st.tuples(st.sampled_from(Tier), sizes, st.booleans()), max_size=12))
def test_peak_is_the_most_that_is_ever_live(slots: list[tuple[Tier, int, bool]]) -> None:
    """Slots are allocated one after another; some are freed right away."""
    body: list[Instruction] = []
    live = dict.fromkeys(Tier, 0)
    most = dict.fromkeys(Tier, 0)
    for index, (tier, nbytes, freed) in enumerate(slots):
        body.append(Instruction(Alloc(index), Stream.COMPUTE))
        live[tier] += nbytes
        most[tier] = max(most[tier], live[tier])
        if freed:
            body.append(Instruction(Free(index), Stream.COMPUTE))
            live[tier] -= nbytes
    made = tuple(Slot(i, 0, tier, nbytes) for i, (tier, nbytes, _) in enumerate(slots))
    drawn = Program(made, tuple(body), len(body), (), (), ())
    for tier in Tier:
        assert peak(problem(), drawn, tier).nbytes == most[tier]


def between_the_calls(program: Program) -> set[int]:
    """The slots that are live when the forward call is over."""
    held = set(program.arguments)
    for instruction in program.body[: program.boundary]:
        match instruction.action:
            case Alloc(slot):
                held.add(slot)
            case Free(slot):
                held.remove(slot)
            case Run(donate=given):
                held -= {source for source, _ in given}
                held |= {target for _, target in given}
    return held


@given(planned())
def test_a_waiting_call_alone_holds_what_it_made_and_does_not_return(
    drawn: tuple[Problem, Plan, Program],
) -> None:
    problem, _, program = drawn
    returned = problem.trace.value_buffers(problem.trace.outputs)
    made = between_the_calls(program) - set(program.arguments)
    slots = [program.slots[s] for s in made if program.slots[s].tier is Tier.DEVICE]
    alone = sum(slot.nbytes for slot in slots if slot.buffer not in returned)
    assert private_bytes(problem.trace, program) == alone


def test_each_call_needs_some_bytes_more_than_are_held_as_it_begins() -> None:
    found = ahead(problem(outside_bytes=5000), program())
    assert found == Ahead(100 + 40, 1000, 128 + 2 + 7)
    assert found.until_backward(0) == 1000
    assert found.until_backward(3) == 1003
    assert found.in_all(3) == 1000 + 128 + 2 + 7
    assert found.in_all(200) == 1200


@given(planned())
def test_what_calls_need_more_adds_up_to_the_peak(drawn: tuple[Problem, Plan, Program]) -> None:
    problem, _, program = drawn
    assume(program.boundary < len(program.body))  # else the pause has no position
    slots = [program.slots[s] for s in program.arguments]
    given = sum(slot.nbytes for slot in slots if slot.tier is Tier.DEVICE)
    most = given + max(0, ahead(problem, program).in_all(problem.between_bytes))
    assert most == peak(problem, program, Tier.DEVICE).nbytes - problem.outside_bytes


@given(planned())
def test_the_pause_is_what_the_budget_leaves_between_the_calls(
    drawn: tuple[Problem, Plan, Program],
) -> None:
    problem, _, program = drawn
    assume(program.boundary < len(program.body))  # else the pause has no position
    tight = dataclasses.replace(problem, budget_bytes=peak(problem, program, Tier.DEVICE).nbytes)
    room = pause_bytes(tight, program)
    assert room >= problem.between_bytes
    assert fits(dataclasses.replace(tight, between_bytes=room), program)
    assert not fits(dataclasses.replace(tight, between_bytes=room + 1), program)


def test_what_backward_reads_again_counts_once() -> None:
    trace = problem().trace
    assert reread_bytes(trace, program(), {1}) == 100
    assert reread_bytes(trace, program(), {0}) == 0, "forward alone reads it"
    assert reread_bytes(trace, program(), {0, 1, 2}) == 1100


@given(st.data())
def test_what_stays_for_another_backward_call_is_what_is_not_freed(data: st.DataObject) -> None:
    drawn = data.draw(problems())
    program = lower(drawn, make_plan({}))
    nothing = Slot(len(program.slots), 0, Tier.DEVICE, 0)
    held = between_the_calls(program)

    def kept(position: int, instruction: Instruction) -> Instruction:
        action = instruction.action
        late = position >= program.boundary and isinstance(action, Free) and action.slot in held
        return dataclasses.replace(instruction, action=Free(nothing.id)) if late else instruction

    body = tuple(kept(position, x) for position, x in enumerate(program.body))
    retaining = dataclasses.replace(program, slots=(*program.slots, nothing), body=body)
    most = peak(drawn, retaining, Tier.DEVICE).nbytes
    more = most - peak(drawn, program, Tier.DEVICE).nbytes
    assert retained_bytes(drawn, program) == more
    arguments = sum(program.slots[slot].nbytes for slot in program.arguments)
    assert 0 <= more <= crossing_bytes(program) + arguments


@given(problems())
def test_a_whole_call_needs_no_more_than_its_buffers_say(problem):
    program, taken = lower(problem, KEEP_ALL), whole(problem.trace)
    unknown = Profile.unknown(len(problem.trace.ops))
    unmeasured = replace(problem, profile=unknown, between_bytes=0)
    needed = peak(unmeasured, program, Tier.DEVICE).nbytes - resident_bytes(problem)
    assert needed <= taken.peak_bytes
    assert crossing_bytes(program) <= taken.waiting_bytes <= taken.peak_bytes


def test_a_whole_step_is_all_that_waits_and_what_one_call_needs_beyond():
    steps, call = WholeSteps(), small_problem().trace
    alone = whole(call)
    assert steps.current_bytes == steps.latest_bytes == 0
    for calls, most in ((3, 0), (1, 3), (2, 3), (4, 3)):
        steps.begin()
        for _ in range(calls):
            steps.call(call)
        assert steps.current_bytes == alone.by(calls)
        assert steps.latest_bytes == (alone.by(most) if most else 0)
    for _ in range(LATEST + 1):
        steps.begin()
        steps.call(call)
    assert steps.latest_bytes == alone.by(1), "older steps are forgotten"
