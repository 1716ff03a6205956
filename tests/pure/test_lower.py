"""lower: any valid plan computes the trace's own results, in any order of the streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import VerifyError
from outcore.interpret import Chooser, in_order, interpret
from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps
from outcore.ir.memory import fits, peak
from outcore.ir.plan import KEEP_ALL, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Copy, Free, Instruction, Program, Run, Stream
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Donation, Phase, Ref, Role
from outcore.ir.verify import verify_trace
from outcore.lower import lower
from outcore.simulate import simulate
from tests.pure import meaning
from tests.pure.building import TraceBuilder, small_hardware, small_problem
from tests.pure.strategies import plans, problems, traces

Golden = Callable[[str, str], None]


def run(problem: Problem, program: Program, choose: Chooser = in_order) -> dict[int, int]:
    """The arrays that the caller sees, by buffer."""
    trace = problem.trace
    arrays = interpret(trace, program, meaning.given(program), meaning.semantics(trace), choose)
    return {b: arrays[b] for b in meaning.results_of(trace)}


@given(problems(), st.integers(1, 1 << 40), st.integers(0, 1 << 40))
def test_budgets_are_nothing_to_what_keeps_everything(
    problem: Problem, budget_bytes: int, outside_bytes: int
) -> None:
    other = replace(problem, budget_bytes=budget_bytes, outside_bytes=outside_bytes)
    kept = KEEP_ALL
    assert lower(other, kept) == lower(problem, kept) == lower(problem, kept, fast=True)


def lowered(problem: Problem, plan: Plan) -> Program | None:
    """The program; None if the plan recomputes from a buffer that is lost."""
    try:
        return lower(problem, plan)
    except VerifyError as error:
        assert error.noun == "plan", error  # noqa: PT017 - any other noun is a defect
        return None


@st.composite
def planned(draw: st.DrawFn) -> tuple[Problem, Plan]:
    problem = draw(problems(draw(traces(mutates=True))))
    return problem, draw(plans(problem))


class TestMeaning:
    @given(planned(), st.randoms(use_true_random=False))
    def test_every_plan_and_every_order_give_the_plain_results(self, case, random) -> None:
        problem, plan = case
        program = lowered(problem, plan)
        if program is None:
            return
        plain = run(problem, lower(problem, make_plan({})))
        assert run(problem, program) == plain

        def adversary(ready: Sequence[int]) -> int:
            chosen: int = random.choice(list(ready))
            return chosen

        for choose in (max, adversary, adversary):
            assert run(problem, program, choose) == plain

    @given(planned())
    def test_budget_of_nothing_still_means_the_same(self, case) -> None:
        problem, plan = case
        program = lowered(replace(problem, budget_bytes=1), plan)
        if program is not None:
            assert run(problem, program) == run(problem, lower(problem, make_plan({})))


class TestMemory:
    @given(planned())
    def test_a_plan_that_fits_without_overlap_fits_with_it(self, case) -> None:
        problem, plan = case
        plainest = lowered(replace(problem, budget_bytes=1), plan)
        if plainest is None:
            return
        least = peak(problem, plainest, Tier.DEVICE).nbytes
        tight = replace(problem, budget_bytes=least)
        assert peak(tight, lower(tight, plan), Tier.DEVICE).nbytes <= least

    @given(problems())
    def test_keep_all_moves_nothing(self, problem) -> None:
        program = lower(problem, make_plan({}))
        assert not any(isinstance(x.action, Copy) for x in program.body)
        timeline = simulate(problem, program)
        assert timeline.stalls == ()
        assert timeline.seconds == pytest.approx(sum(problem.profile.seconds))


def ample(problem: Problem) -> Problem:
    """The problem with a larger budget than any plan can use."""
    return replace(problem, budget_bytes=1 << 40)


def starts(program: Program) -> dict[int, int]:
    """Op -> the body position of its original run."""
    body = enumerate(program.body)
    runs = ((i, x.action) for i, x in body if isinstance(x.action, Run))
    return {run.op: i for i, run in runs if not run.again}


def slot_at(program: Program, op: int, buffer: int) -> int:
    """The slot of `buffer` that the original run of `op` touches."""
    run = program.body[starts(program)[op]].action
    assert isinstance(run, Run)
    return next(s for s in (*run.reads, *run.writes) if program.slots[s].buffer == buffer)


def offloads(plan: Plan) -> list[tuple[Gap, Offload]]:
    return [(gap, choice) for gap, choice in plan.choices if isinstance(choice, Offload)]


def taken_over(program: Program, copy: int) -> bool:
    """Whether an op writes its result over what the copy at a body position fetches."""
    runs = (x.action for x in program.body if isinstance(x.action, Run))
    taken = {source for run in runs for source, _ in run.donate}
    return getattr(program.body[copy].action, "target", None) in taken


class TestHints:
    @given(planned())
    def test_memory_is_free_where_the_plan_says_and_no_earlier(self, case) -> None:
        problem, plan = case
        program = lowered(ample(problem), plan)
        if program is None:
            return
        run_at = starts(program)
        copied = {x.action.source: i for i, x in enumerate(program.body) if is_copy(x)}
        freed = {x.action.slot: i for i, x in enumerate(program.body) if is_free(x)}
        for gap, choice in offloads(plan):
            slot = slot_at(program, gap.after, gap.buffer)
            if choice.release is not None and slot in copied:
                assert run_at[choice.release - 1] < freed[slot] < run_at[choice.release]

    @given(st.data())
    def test_copies_go_and_come_back_where_the_plan_says(self, data) -> None:
        """One gap is offloaded at a time: several copies back would keep to the order of use."""
        problem = data.draw(problems())
        for gap, choice in offloads(data.draw(plans(problem))):
            program = lower(ample(problem), make_plan({gap: choice}))
            if gap.dead:  # nothing is recomputed, so nothing is copied back
                assert sum(map(is_copy, program.body)) == 1
                continue
            out, back = (i for i, x in enumerate(program.body) if is_copy(x))
            run_at, spans = starts(program), simulate(ample(problem), program).spans
            depart = gap.after + 1 if choice.depart is None else choice.depart
            soonest = max(depart, gap.after + 1)
            prefetch = soonest if choice.prefetch is None else choice.prefetch
            if problem.trace.boundary <= gap.before and taken_over(program, back):
                prefetch = max(prefetch, problem.trace.boundary)  # a donated slot may not cross
            arrive = gap.before if choice.arrive is None else choice.arrive
            arrive = arrive if arrive >= prefetch else gap.before
            assert out < run_at[depart]
            assert not depart or run_at[depart - 1] < out
            assert run_at[prefetch - 1] < back < run_at[prefetch]
            if choice.depart:
                started = spans[run_at[depart - 1]].stop_seconds
                assert spans[out].start_seconds >= started, "not as soon as the bytes are there"
            assert spans[back].stop_seconds <= spans[run_at[arrive]].start_seconds
            paced = {i for i, x in enumerate(program.body) if x.pace}
            assert paced <= {out, run_at[arrive]}

    def test_each_gap_keeps_to_its_own_hint(self) -> None:
        """The second gap's hint does not affect the first gap's copy back."""
        gaps = (
            "gap 3 after 1 before 3 offload host",
            "gap 3 after 3 before 8 offload host prefetch 7",
        )
        alone, both = (
            lower(small_problem(1 << 20), parse("\n".join(("plan", *some)), Plan))
            for some in (gaps[:1], gaps)
        )
        backs = [
            next(i for i, x in enumerate(program.body) if is_copy_back(program, x))
            for program in (alone, both)
        ]
        assert backs[1] < starts(both)[2]
        assert backs[0] == backs[1]

    def test_an_early_deadline_does_not_wait_for_a_later_one(self) -> None:
        """`conv` leaves first but may linger; `curved` must be freed before it."""
        plan = parse(
            "plan\n"
            "gap 3 after 3 before 8 offload host release 7\n"
            "gap 5 after 3 before 6 offload host release 4",
            Plan,
        )
        program = lower(small_problem(1 << 20), plan)
        freed = {x.action.slot: i for i, x in enumerate(program.body) if is_free(x)}
        conv, curved = slot_at(program, 3, 3), slot_at(program, 3, 5)
        assert freed[curved] < starts(program)[4] < starts(program)[6] < freed[conv]

    def test_memory_comes_before_hints(self) -> None:
        """With no room to spare, hinted plans free at once and fetch at the last moment."""
        hints = ("release 7 prefetch 4", "depart 6 release 7 prefetch 6 arrive 7")
        for plan in (parse(f"plan\ngap 3 after 3 before 8 offload host {h}", Plan) for h in hints):
            program = lower(small_problem(1), plan)
            freed = {x.action.slot: i for i, x in enumerate(program.body) if is_free(x)}
            (back,) = (i for i, x in enumerate(program.body) if is_copy_back(program, x))
            assert freed[slot_at(program, 3, 3)] < starts(program)[4]
            assert starts(program)[7] < back
            assert not any(x.pace for x in program.body if isinstance(x.action, Run))

    def test_what_is_to_depart_soonest_makes_room_first(self) -> None:
        """At the boundary one of two lingering buffers must leave: the one to depart sooner."""
        plan = parse(
            "plan\n"
            "gap 3 after 3 before 8 offload host depart 8\n"
            "gap 5 after 3 before 6 offload host depart 6",
            Plan,
        )
        roomy = small_problem(1 << 20)
        most = peak(roomy, lower(roomy, plan), Tier.DEVICE).nbytes
        program = lower(small_problem(most - 1), plan)
        body = enumerate(program.body)
        out = {x.action.source: i for i, x in body if is_copy(x) and not is_copy_back(program, x)}
        conv, curved = slot_at(program, 3, 3), slot_at(program, 3, 5)
        assert out[curved] < starts(program)[5]
        assert starts(program)[7] < out[conv] < starts(program)[8]

    def test_a_copy_departs_before_a_recomputation_reads_it(self) -> None:
        """Before op 7, `dropped` is recomputed from `conv`, which departs only at op 8."""
        plan = parse(
            "plan\ngap 3 after 3 before 8 offload host depart 8\ngap 4 after 2 before 7 recompute",
            Plan,
        )
        program = lower(small_problem(1 << 20), plan)
        out, back = (i for i, x in enumerate(program.body) if is_copy(x))
        assert starts(program)[6] < out < back < starts(program)[7]

    def test_a_copy_departs_before_a_rerun_gives_it_up(self) -> None:
        """Op 0 makes both. Its rerun for the second makes the first again; the copy is dropped."""
        t = TraceBuilder()
        x = t.new(16, Role.INPUT, borrowed=True)
        first, second, out, tangent, grad = (t.new(16, Role.ACTIVATION) for _ in range(5))
        t.op("test.f", (Ref(x),), (first, second))
        t.op("test.g", (Ref(first), Ref(second)), (out,))
        t.op("test.b", (Ref(tangent), Ref(first), Ref(second)), (grad,), Phase.BACKWARD)
        trace = t.trace([x], (Ref(out),), [tangent], (Ref(grad),))
        profile = Profile((1e-3,) * 3, (0,) * 3, Source.ESTIMATED)
        problem = Problem(trace, profile, small_hardware(), 1 << 20)
        text = (
            "plan\ngap 1 after 1 before 2 offload host depart 2\ngap 2 after 1 before 2 recompute"
        )
        program = lower(problem, parse(text, Plan))
        (copy,) = (i for i, x in enumerate(program.body) if is_copy(x))
        assert starts(program)[1] < copy < starts(program)[2]
        assert run(problem, program) == run(problem, lower(problem, make_plan({})))


def is_copy(instruction: Instruction) -> bool:
    return isinstance(instruction.action, Copy)


def is_free(instruction: Instruction) -> bool:
    return isinstance(instruction.action, Free)


def is_copy_back(program: Program, instruction: Instruction) -> bool:
    action = instruction.action
    return isinstance(action, Copy) and program.slots[action.target].tier is Tier.DEVICE


class TestText:
    @pytest.mark.parametrize(
        ("name", "budget_bytes", "gaps"),
        [
            ("keep", 10_000, ()),
            ("offload", 7_000, ("3 after 3 before 8 offload host",)),
            ("offload_without_room", 1, ("3 after 3 before 8 offload host",)),
            (
                "offload_with_hints",
                10_000,
                ("3 after 3 before 8 offload disk release 5 prefetch 7",),
            ),
            (
                "offload_with_every_hint",
                10_000,
                ("3 after 3 before 8 offload host depart 5 release 6 prefetch 6 arrive 7",),
            ),
            (
                "offload_beside",
                10_000,
                ("3 after 3 before 8 offload host depart 3 release 4",),
            ),
            (
                "offload_two_gaps",
                7_000,
                ("3 after 1 before 3 offload host", "3 after 3 before 8 offload host"),
            ),
            ("recompute", 7_000, ("4 after 2 before 7 recompute", "5 after 3 before 6 recompute")),
            (
                "recompute_stay",
                7_000,
                ("4 after 2 before 7 recompute stay", "5 after 3 before 6 recompute"),
            ),
            (
                "recompute_from_offloaded",
                7_000,
                ("3 after 3 before 8 offload host", "4 after 2 before 7 recompute"),
            ),
        ],
    )
    def test_a_small_problem_under_one_plan(
        self, name: str, budget_bytes: int, gaps: tuple[str, ...], golden: Golden
    ) -> None:
        problem = small_problem(budget_bytes)
        plan = parse("\n".join(("plan", *(f"gap {gap}" for gap in gaps))), Plan)
        program = lower(problem, plan)
        timeline = simulate(problem, program)
        summary = (
            f"# budget {budget_bytes} B, peak {timeline.peak(Tier.DEVICE)} B, "
            f"{timeline.seconds:.6f} s, stalls {timeline.stall_seconds():.6f} s"
        )
        golden(f"{to_text(plan)}\n{summary}\n{to_text(program)}", f"lower/{name}")

    def test_the_result_of_op_6_takes_the_memory_of_its_argument(self) -> None:
        program = lower(small_problem(), make_plan({}))
        run = program.body[starts(program)[6]].action
        assert isinstance(run, Run)
        assert run.donate == ((run.reads[0], run.writes[0]),)

    def test_what_the_backward_call_writes_over_is_fetched_in_it(self) -> None:
        """Even with room before: a slot that crosses the boundary is never overwritten."""
        t = TraceBuilder()
        x = t.new(64, Role.INPUT, borrowed=True)
        maps = [t.new(64, Role.ACTIVATION) for _ in range(4)]
        for source, made in pairwise([x, *maps]):
            t.op("test.f", (Ref(source),), (made,))
        tangent, grad = (t.new(64, Role.GRAD) for _ in range(2))
        op = t.op("test.b", (Ref(maps[0]), Ref(tangent)), (grad,), Phase.BACKWARD)
        t.donations.append(Donation(op, maps[0], grad))
        trace = t.trace([x], (Ref(maps[-1]),), [tangent], (Ref(grad),))
        profile = Profile((1e-3,) * len(trace.ops), (0,) * len(trace.ops), Source.ESTIMATED)
        problem = Problem(trace, profile, small_hardware(), 1 << 20)
        (gap,) = (g for g in gaps(trace) if g.buffer == 1)
        program = lower(problem, make_plan({gap: Offload(Tier.HOST)}))
        back = [i for i, x in enumerate(program.body) if x.stream is Stream.IN]
        assert min(back) >= program.boundary
        (run,) = (x.action for x in program.body if isinstance(x.action, Run) and x.action.op == 4)
        assert run.donate


class TestTime:
    @given(planned())
    def test_keeping_all_is_the_floor_of_time(self, case) -> None:
        """Among plans with the same variants."""
        problem, plan = case
        program = lowered(problem, plan)
        if program is None:
            return
        floor = simulate(problem, lower(problem, replace(plan, choices=()))).seconds
        assert simulate(problem, program).seconds >= floor - 1e-12

    @given(planned())
    @settings(max_examples=50)
    def test_spans_of_one_stream_do_not_overlap(self, case) -> None:
        problem, plan = case
        program = lowered(problem, plan)
        if program is None:
            return
        timeline = simulate(problem, program)
        ends: dict[object, float] = {}
        for span in timeline.spans:
            assert span.start_seconds >= ends.get(span.stream, 0.0)
            ends[span.stream] = span.stop_seconds
        assert fits(replace(problem, budget_bytes=timeline.peak(Tier.DEVICE)), program) or any(
            timeline.peak(t) > problem.limit_bytes(t) for t in (Tier.HOST, Tier.DISK)
        )

    @given(planned())
    def test_a_copy_out_starts_no_sooner_than_it_is_issued(self, case) -> None:
        """As with a driver: the runs issued before the copy are done."""
        problem, plan = case
        program = lowered(problem, plan)
        if program is None:
            return
        ran = 0.0
        for span, each in zip(simulate(problem, program).spans, program.body, strict=True):
            if isinstance(each.action, Run):
                ran = span.stop_seconds
            elif isinstance(each.action, Copy) and each.stream is Stream.OUT:
                assert span.start_seconds >= ran


@pytest.mark.parametrize("ops", [0, 1])
def test_what_is_passed_in_after_the_last_op_stays(ops: int) -> None:
    """No op runs after that, so none could free it."""
    t = TraceBuilder()
    x, out, tangent = (t.new(16, role) for role in (Role.INPUT, Role.ACTIVATION, Role.GRAD))
    for _ in range(ops):
        t.op("test.f", (Ref(x),), (out,))
    trace = t.trace([x], (Ref(out),) * ops, [tangent], (None,))
    verify_trace(trace)
    profile = Profile((1e-3,) * ops, (0,) * ops, Source.ESTIMATED)
    problem = replace(small_problem(), trace=trace, profile=profile)
    program = lower(problem, KEEP_ALL)
    found = [program.slots[s].buffer for s in program.results]
    assert found == ([1, 2] if ops else [0, 2])
