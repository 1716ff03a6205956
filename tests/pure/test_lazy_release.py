"""lazy_release: memory that nothing needs yet is freed later, and no step gets slower."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings

from outcore.evaluate import Evaluation, Evaluator
from outcore.ir.hardware import Link, Tier
from outcore.ir.memory import fits
from outcore.ir.plan import Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Free, Program, Run, Stream
from outcore.lower import lower
from outcore.policies.search import lazy_release as lazy_release_module
from outcore.policies.search.judge import judge
from outcore.policies.search.lazy_release import lazy_release
from outcore.policies.search.search import Search
from outcore.simulate import simulate
from tests.pure.building import relinked
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import planned
from tests.pure.test_policies import chain

drawn = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def frees(program: Program) -> dict[int, int]:
    """Device slot that is copied out -> the number of runs before it is freed."""
    leaving = {
        x.action.source
        for x in program.body
        if x.stream is Stream.OUT and isinstance(x.action, Copy)
    }
    found, runs = {}, 0
    for instruction in program.body:
        action = instruction.action
        runs += isinstance(action, Run)
        if isinstance(action, Free) and action.slot in leaving:
            found[action.slot] = runs
    return found


def order(program: Program, stream: Stream) -> list[int]:
    """The buffers that are copied on a stream, in order."""
    copies = (x.action for x in program.body if x.stream is stream)
    return [program.slots[c.source].buffer for c in copies if isinstance(c, Copy)]


@drawn
@given(planned=planned())
def test_memory_is_free_later_and_nothing_else_is_changed(planned):
    problem, plan, before = planned
    found = lazy_release(Evaluator(problem), plan)
    after = lower(problem, found)
    assert fits(problem, after)
    assert simulate(problem, after).seconds <= simulate(problem, before).seconds
    for stream in (Stream.OUT, Stream.IN):
        assert order(after, stream) == order(before, stream)
    old = frees(before)
    assert all(runs >= old[slot] for slot, runs in frees(after).items())
    for (gap, new), (same, was) in zip(found.choices, plan.choices, strict=True):
        assert gap == same
        if new != was:
            assert isinstance(new, Offload)
            assert replace(new, release=None) == was
    assert replace(found, choices=plan.choices) == plan


def hints(problem: Problem, plan: Plan) -> list[int | None]:
    found = lazy_release(Evaluator(problem), plan)
    return [choice.release for _, choice in found.choices if isinstance(choice, Offload)]


def out_at(problem: Problem, seconds: float) -> Problem:
    """The problem with a link on which 64 KiB take `seconds` to the host."""
    out = Link(65536 / seconds)
    return relinked(problem, lambda start, _, link: out if start is Tier.DEVICE else link)


AWAY = make_plan({Gap(1, 1, 8): Offload(Tier.HOST)})


def test_a_copy_out_has_half_of_its_time_more_and_some_of_the_step():
    problem = chain()  # ops of 1 ms; the buffer's last use ends at 2 ms
    assert hints(out_at(problem, 0.5e-3), AWAY) == [None]  # 0.75 + 0.045 ms: within op 2 anyway
    assert hints(out_at(problem, 0.9e-3), AWAY) == [4]  # 1.395 ms; without a hint, before op 3
    assert hints(out_at(problem, 1.9e-3), AWAY) == [5]  # 2.895 ms; without a hint, before op 4


def test_memory_is_free_for_the_next_copy_back():
    problem = out_at(chain(), 1.9e-3)
    soon = make_plan(AWAY.by_gap | {Gap(4, 4, 5): Offload(Tier.HOST)})
    assert order(lower(problem, soon), Stream.IN) == [4, 1]
    assert hints(problem, soon) == [None, None]


def test_a_slower_copy_out_no_longer_stops_the_step():
    problem, slower = out_at(chain(), 0.9e-3), out_at(chain(), 1.3e-3)
    plans_ = AWAY, lazy_release(Evaluator(problem), AWAY)
    programs = [lower(problem, plan) for plan in plans_]
    assert [round(1e3 * simulate(slower, p).seconds, 3) for p in programs] == [9.3, 9.0]


@pytest.mark.parametrize("hint", [{"release": 3}, {"depart": 2}])
def test_what_leaves_by_a_hint_stays_as_it_is(hint: dict[str, int]):
    problem = out_at(chain(), 0.9e-3)
    plan = make_plan({Gap(1, 1, 8): Offload(Tier.HOST, **hint)})
    assert lazy_release(Evaluator(problem), plan) == plan


def test_frees_that_would_be_slower_stay_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch):
    """On real timelines few are: a copy back must have its room by chance. Here one is faked."""
    problem = table3_problem(640, 16 * 10**9, 12e9)
    found = Search(effort=0.2).plan(problem)
    offloads = {g: replace(c, release=None) for g, c in found.choices if isinstance(c, Offload)}
    early = make_plan(found.by_gap | offloads)
    evaluator = Evaluator(problem)
    late = lazy_release(evaluator, early)
    moved = [gap for gap, choice in late.choices if choice != early.choice(gap)]
    slow = moved[len(moved) // 2]

    def judged(_: Evaluator, plan: Plan) -> Evaluation:
        real = judge(evaluator, plan)
        return real if plan.choice(slow) == early.choice(slow) else real._replace(seconds=inf)

    monkeypatch.setattr(lazy_release_module, "judge", judged)
    assert len(moved) > 8
    assert lazy_release(evaluator, early).by_gap == late.by_gap | {slow: early.choice(slow)}


def test_resnet_is_no_slower_where_copies_are():
    problem = table3_problem(640, 16 * 10**9, 12e9)
    late = Search(effort=0.2).plan(problem)
    eager = {g: replace(c, release=None) for g, c in late.choices if isinstance(c, Offload)}
    early = make_plan(late.by_gap | eager)
    assert early.by_gap != late.by_gap
    slower = relinked(
        problem, lambda _a, _b, link: Link(0.9 * link.bytes_per_second, link.latency_seconds)
    )
    programs = [lower(problem, plan) for plan in (early, late)]
    planned = [simulate(problem, program).seconds for program in programs]
    assert planned[0] == planned[1]
    times = [simulate(slower, program).seconds for program in programs]
    assert times[1] < times[0]
