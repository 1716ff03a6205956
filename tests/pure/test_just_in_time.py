"""just_in_time: copies back are issued later, with enough time left, and no step gets slower."""

from __future__ import annotations

from dataclasses import replace
from operator import le

from hypothesis import HealthCheck, given, settings

from outcore.allocators import reserve
from outcore.evaluate import Evaluator
from outcore.ir.hardware import Link, Tier
from outcore.ir.liveness import gaps
from outcore.ir.memory import fits, held_bytes
from outcore.ir.plan import Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program, Run, Stream
from outcore.ir.trace import Phase, Ref, Role
from outcore.lower import lower
from outcore.policies.search.just_in_time import COPY_SLACK, just_in_time
from outcore.policies.search.search import Search
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, relinked
from tests.pure.chainer_resnet import table3_problem
from tests.pure.strategies import planned
from tests.pure.test_policies import chain, problem_of

drawn = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def issues(program: Program) -> list[tuple[int, int]]:
    """For each copy back, in order: its buffer, and the number of runs issued before it."""
    found, runs = [], 0
    for instruction in program.body:
        action = instruction.action
        runs += isinstance(action, Run)
        if instruction.stream is Stream.IN and isinstance(action, Copy):
            found.append((program.slots[action.target].buffer, runs))
    return found


def at_runs(problem: Problem, program: Program) -> list[int]:
    """Device bytes held at each run, without `between_bytes`.

    Those count at the first position of backward only: a run, or the allocation for a copy back.
    """
    held = held_bytes(replace(problem, between_bytes=0), program, Tier.DEVICE)
    return [h for h, x in zip(held, program.body, strict=True) if isinstance(x.action, Run)]


@drawn
@given(planned=planned())
def test_copies_back_are_later_and_nothing_else_is_changed(planned):
    problem, plan, before = planned
    found = just_in_time(Evaluator(problem), plan)
    after = lower(problem, found)
    assert fits(problem, after)
    assert simulate(problem, after).seconds <= simulate(problem, before).seconds
    assert [b for b, _ in issues(after)] == [b for b, _ in issues(before)]
    assert all(new >= old for (_, old), (_, new) in zip(issues(before), issues(after), strict=True))
    assert all(map(le, at_runs(problem, after), at_runs(problem, before)))
    for (gap, new), (same, old) in zip(found.choices, plan.choices, strict=True):
        assert gap == same
        if new != old:
            assert isinstance(new, Offload)
            assert replace(new, prefetch=None) == replace(old, prefetch=None)
            assert new.prefetch is not None
    assert replace(found, choices=plan.choices) == plan


def hints(problem: Problem, plan: Plan) -> list[int | None]:
    found = just_in_time(Evaluator(problem), plan)
    return [choice.prefetch for _, choice in found.choices if isinstance(choice, Offload)]


def back_at(problem: Problem, bytes_per_second: float) -> Problem:
    """The problem with another link from the host to the device."""
    back = Link(bytes_per_second)
    return relinked(problem, lambda _, to, link: back if to is Tier.DEVICE else link)


def test_a_copy_back_has_time_and_half_and_some_of_the_step_left():
    problem = chain()  # ops of 1 ms; copies take 66 us
    away = Gap(1, 1, 8), Gap(2, 2, 7), Gap(3, 3, 6)
    plan = make_plan(dict.fromkeys(away, Offload(Tier.HOST)))
    assert issues(lower(problem, plan)) == [(3, 4), (2, 4), (1, 4)]
    assert hints(problem, plan) == [7, 6, 5]
    longer = back_at(problem, 65536 / 0.7e-3)  # 1.5 x 0.7 = 1.05 ms, plus 0.18 ms
    assert hints(longer, plan) == [6, 5, None]


def test_what_is_to_arrive_by_a_hint_stays_as_it_is():
    problem = chain()
    plan = make_plan({Gap(1, 1, 8): Offload(Tier.HOST, arrive=6)})
    assert hints(problem, plan) == [None]


def test_what_is_to_leave_finds_its_room_on_the_host():
    t = TraceBuilder()
    x = t.new(64, Role.INPUT, borrowed=True)
    loss, tangent = t.new(64, Role.ACTIVATION), t.new(64, Role.GRAD)
    t.op("test.loss", (Ref(x),), (loss,))
    made, again = [tangent], {8: 1, 10: 5}
    for op in range(1, 11):
        reads = (made[-1], made[again[op]]) if op in again else (made[-1],)
        made.append(t.new(64 * 256, Role.GRAD))
        t.op("test.b", tuple(map(Ref, reads)), (made[-1],), Phase.BACKWARD)
    trace = t.trace([x], (Ref(loss),), [tangent], (Ref(made[-1]),))
    problem = problem_of(trace, budget_bytes=1 << 30)
    away = [gap for gap in gaps(trace) if gap.before - gap.after > 1]
    plan = make_plan(dict.fromkeys(away, Offload(Tier.HOST)))
    tight = replace(problem, host_budget_bytes=64 * 1024)
    assert fits(tight, lower(tight, plan))
    assert hints(tight, plan) == [6, 9]


def test_resnet_can_wait_for_a_slower_link_and_lies_in_fewer_pieces():
    problem = table3_problem(640, 16 * 10**9, 12e9)
    found = Search(effort=0.2).plan(problem)
    offloads = {g: replace(c, release=None) for g, c in found.choices if isinstance(c, Offload)}
    late = make_plan(found.by_gap | offloads)
    hintless = {gap: replace(choice, prefetch=None) for gap, choice in offloads.items()}
    early = make_plan(late.by_gap | hintless)
    assert sum(c.prefetch is not None for c in late.by_gap.values() if isinstance(c, Offload)) > 5
    slower, capacity = back_at(problem, 12e9 / COPY_SLACK), problem.budget_bytes * 33 // 32
    for asked in (problem, slower):
        times = [simulate(asked, lower(problem, plan)).seconds for plan in (early, late)]
        assert times[0] == times[1]
    programs = [lower(problem, plan) for plan in (early, late)]
    pages = [reserve(problem, p, "expandable-segments", capacity_bytes=capacity) for p in programs]
    assert pages[1].retries < pages[0].retries
    blocks = [reserve(problem, program, "best-fit").reserved.nbytes for program in programs]
    assert blocks[1] < blocks[0]
