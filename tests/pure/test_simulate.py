"""simulate: when each instruction of small programs runs, and what compute waits for, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Program, Stream
from outcore.ir.text import parse
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.ir.trace import Trace
from outcore.ir.verify import verify_trace
from outcore.ir.verify_program import verify_program
from outcore.simulate import simulate

# Four ops of one second; every buffer has 1000 B. A copy out takes 2 s, a copy back 4 s.
TRACE = """
trace boundary 4
buffer 0 input 1000 B borrowed "x"
buffer 1 activation 1000 B "a"
buffer 2 activation 1000 B "b"
buffer 3 activation 1000 B "c"
buffer 4 activation 1000 B "d"
value %0 on 0 uint8 (1000,) stride (1,)
value %1 on 1 uint8 (1000,) stride (1,)
value %2 on 2 uint8 (1000,) stride (1,)
value %3 on 3 uint8 (1000,) stride (1,)
value %4 on 4 uint8 (1000,) stride (1,)
inputs %0
op 0 forward f(%0) -> %1
op 1 forward g(%1) -> %2
op 2 forward g(%2) -> %3
op 3 forward h(%3, %1) -> %4
outputs %4
"""
OUT, BACK = Link(1000.0, latency_seconds=1.0), Link(250.0)

# `a` leaves after op 1 and is back for op 3; nothing overlaps more than it must.
PROGRAM = """
program boundary 17
slot s0 buffer 0 device 1000 B
slot s1 buffer 1 device 1000 B
slot s2 buffer 2 device 1000 B
slot s3 buffer 1 host 1024 B
slot s4 buffer 3 device 1000 B
slot s5 buffer 1 device 1024 B
slot s6 buffer 4 device 1000 B
arguments s0
results s0 s6
0: compute alloc s1
1: compute run 0 s0 -> s1
2: compute alloc s2
3: compute run 1 s1 -> s2
4: out alloc s3
5: out copy s1 -> s3 after 1
6: compute free s1 after 5
7: compute alloc s4
8: compute run 2 s2 -> s4
9: compute free s2
10: compute alloc s5
11: in copy s3 -> s5 after 5 10
12: in free s3
13: compute alloc s6
14: compute run 3 s4 s5 -> s6 after 11
15: compute free s4
16: compute free s5
"""


def problem() -> Problem:
    hardware = Hardware(
        "by hand",
        ((Tier.DEVICE, 10**6), (Tier.HOST, 10**6)),
        ((Tier.DEVICE, Tier.HOST, OUT), (Tier.HOST, Tier.DEVICE, BACK)),
    )
    profile = Profile((1.0,) * 4, (0, 0, 0, 500), Source.ESTIMATED)
    return Problem(parse(TRACE, Trace), profile, hardware, 10**6)


def played(*edits: tuple[str, str]) -> Timeline:
    """The timeline of the program with pieces of its text replaced."""
    text = PROGRAM
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    program = parse(text, Program)
    verify_program(problem(), program)
    return simulate(problem(), program)


def spans(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """Start and stop of what takes time, by body position."""
    whole = ((s.instruction, (s.start_seconds, s.stop_seconds)) for s in timeline.spans)
    return {position: times for position, times in whole if times[0] < times[1]}


def test_the_trace_of_this_file_is_valid() -> None:
    verify_trace(problem().trace)


def test_each_stream_runs_in_order_and_waits_for_the_others() -> None:
    """The copy out starts with op 1; op 2 waits for the memory, op 3 for the copy back."""
    timeline = played()
    assert spans(timeline) == {1: (0, 1), 3: (1, 2), 5: (1, 3), 8: (3, 4), 11: (4, 8), 14: (8, 9)}
    assert timeline.stalls == (Stall(6, Cause.RELEASE, 1.0), Stall(14, Cause.FETCH, 4.0))
    assert timeline.seconds == 9
    assert timeline.source is Source.SIMULATED
    assert [span.instruction for span in timeline.spans] == list(range(17))


def test_figures_of_a_timeline() -> None:
    timeline = played()
    assert timeline.stall_seconds() == 5
    assert [timeline.stall_seconds(cause) for cause in Cause] == [4, 1, 0]
    assert [timeline.busy_seconds(stream) for stream in Stream] == [4, 2, 4]


def test_memory_is_that_of_the_program_and_not_of_time() -> None:
    """Device: x, `a` fetched back, c, d and the workspace of op 3. Host: the extent."""
    timeline = played()
    assert timeline.peak(Tier.DEVICE) == 1000 + 1024 + 1000 + 1000 + 500
    assert timeline.peak(Tier.HOST) == 1024
    assert timeline.peak(Tier.DISK) == 0


def test_what_is_not_needed_yet_is_not_waited_for() -> None:
    """If `a` is freed after op 2 instead of before it, it costs no stall."""
    moved = played(
        ("6: compute free s1 after 5\n7: compute alloc s4\n8: compute run 2 s2 -> s4",
         "6: compute alloc s4\n7: compute run 2 s2 -> s4\n8: compute free s1 after 5"),
    )  # fmt: skip
    assert spans(moved)[7] == (2, 3)
    assert moved.stalls == (Stall(14, Cause.FETCH, 4.0),)
    assert moved.seconds == 8


def test_an_early_copy_back_waits_for_its_copy_out_only() -> None:
    """If it is issued as soon as `a` is away, the copy back runs at the same time as op 2."""
    early = played(
        ("7: compute alloc s4", "7: compute alloc s5"),
        ("8: compute run 2 s2 -> s4", "8: in copy s3 -> s5 after 5 7"),
        ("9: compute free s2", "9: compute alloc s4"),
        ("10: compute alloc s5", "10: compute run 2 s2 -> s4"),
        ("11: in copy s3 -> s5 after 5 10", "11: compute free s2"),
        ("s6 after 11", "s6 after 8"),
    )
    assert spans(early)[8] == (3, 7)
    assert early.stalls == (Stall(6, Cause.RELEASE, 1.0), Stall(14, Cause.FETCH, 3.0))
    assert early.seconds == 8


def test_pace_delays_what_it_stands_on() -> None:
    """The plan asks op 2 to wait for the copy out, which nothing else needs by then."""
    paced = played(
        ("6: compute free s1 after 5\n7: compute alloc s4\n8: compute run 2 s2 -> s4",
         "6: compute alloc s4\n7: compute run 2 s2 -> s4 pace 5\n8: compute free s1 after 5"),
    )  # fmt: skip
    assert spans(paced)[7] == (3, 4)
    assert paced.stalls == (Stall(7, Cause.PACE, 1.0), Stall(14, Cause.FETCH, 4.0))


def test_pace_on_a_copy_shows_where_the_copy_is_needed() -> None:
    """The copy back follows op 2 already, so a pace on op 2 changes nothing."""
    paced = played(
        ("10: compute alloc s5\n11: in copy s3 -> s5 after 5 10",
         "10: compute alloc s5\n11: in copy s3 -> s5 after 5 10 pace 8"),
    )  # fmt: skip
    assert paced == played()


def test_a_hazard_and_a_pace_that_end_together_are_a_hazard() -> None:
    both = played(("s6 after 11", "s6 after 11 pace 11"))
    assert both.stalls == played().stalls


def test_a_wait_for_a_copy_out_is_a_release_whatever_waits() -> None:
    """What waits need not be the free itself."""
    waiting = played(
        ("6: compute free s1 after 5\n7: compute alloc s4\n8: compute run 2 s2 -> s4",
         "6: compute alloc s4 after 5\n7: compute run 2 s2 -> s4\n8: compute free s1"),
    )  # fmt: skip
    assert waiting.stalls[0] == Stall(6, Cause.RELEASE, 1.0)


def test_a_copy_takes_its_buffer_s_bytes_not_its_slot_s() -> None:
    wider = played(("s3 buffer 1 host 1024 B", "s3 buffer 1 host 4096 B"))
    assert spans(wider) == spans(played())
    assert wider.peak(Tier.HOST) == 4096


def test_an_empty_program_takes_no_time() -> None:
    empty = Program((), (), 0, (), (), ())
    timeline = simulate(problem(), empty)
    assert (timeline.seconds, timeline.stalls, timeline.spans) == (0, (), ())


def test_a_timeline_begins_with_its_first_span() -> None:
    """Measured timelines start at some reading of a clock."""
    measured = replace(
        played(),
        spans=(Span(1, Stream.OUT, 105.0, 107.5), Span(0, Stream.COMPUTE, 104.5, 106.0)),
        source=Source.MEASURED,
    )
    assert measured.seconds == pytest.approx(3.0)
