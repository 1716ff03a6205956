"""Any valid plan gives the trace's own results, whatever order the streams run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import VerifyError
from outcore.interpret import in_order, interpret
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, peak
from outcore.ir.plan import Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program
from outcore.lower import lower
from outcore.simulate import simulate
from tests.pure import meaning
from tests.pure.strategies import plans, problems


def run(problem: Problem, program: Program, choose: object = in_order) -> dict[int, int]:
    trace = problem.trace
    arrays = interpret(
        trace, program, meaning.given(program), meaning.semantics(trace), choose  # type: ignore[arg-type]  # chooser
    )
    return {b: arrays[b] for b in meaning.results_of(trace)}


def lowered(problem: Problem, plan: Plan) -> Program | None:
    """The program, or None where the plan recomputes from something that is gone for good."""
    try:
        return lower(problem, plan)
    except VerifyError as error:
        assert error.noun == "plan", error  # noqa: PT017 - any other noun is a defect
        return None


@st.composite
def planned(draw: st.DrawFn) -> tuple[Problem, Plan]:
    problem = draw(problems())
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
            return random.choice(list(ready))

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


class TestTime:
    @given(planned())
    def test_keep_all_is_the_floor_of_time(self, case) -> None:
        problem, plan = case
        program = lowered(problem, plan)
        if program is None:
            return
        floor = simulate(problem, lower(problem, make_plan({}))).seconds
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
