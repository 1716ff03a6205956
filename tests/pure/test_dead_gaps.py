"""Dead gaps: buffers past their last use that a plan can hold for recomputations."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from outcore.errors import VerifyError
from outcore.evaluate import KEEP as KEEP_KIND
from outcore.evaluate import OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import dead_gaps, gaps
from outcore.ir.memory import fits
from outcore.ir.plan import KEEP, Choice, Gap, Offload, Recompute, default_choice, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Alloc, Copy, Free, Program, Run
from outcore.ir.trace import Ref, Role, Trace
from outcore.lower import lower
from outcore.policies.search.search import Search
from outcore.policies.search.space import WORTH, make_space
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, dense_problem, small_problem

AWAY = Offload(Tier.HOST)
AGAIN = Recompute()
DENSE = dense_problem()


def by_name(problem: Problem) -> dict[str, int]:
    return {buffer.name: buffer.id for buffer in problem.trace.buffers if buffer.name}


def dead(problem: Problem) -> tuple[Gap, ...]:
    return dead_gaps(problem.trace)


def program_of(choice: Choice, again: Choice = AGAIN, problem: Problem = DENSE) -> Program:
    """The program with `again` for all concatenations, and `choice` for all dead gaps."""
    names = by_name(problem)
    cats = {names[name] for name in names if name.startswith("cat")}
    crossing = (g for g in gaps(problem.trace) if g.buffer in cats)
    choices: dict[Gap, Choice] = dict.fromkeys(crossing, again)
    return lower(problem, make_plan(choices | dict.fromkeys(dead(problem), choice)))


def reruns(problem: Problem, program: Program) -> Counter[str]:
    """How often ops run again, by target."""
    runs = (x.action for x in program.body if isinstance(x.action, Run) and x.action.again)
    return Counter(problem.trace.ops[run.op].target for run in runs)


def test_they_are_what_larger_things_are_made_of():
    names = {buffer: name for name, buffer in by_name(DENSE).items()}
    ends = {names[gap.buffer]: gap for gap in dead(DENSE)}
    assert sorted(ends) == ["y0", "y1", "y2", "y3"]  # y4 is the result
    trace = DENSE.trace
    last_cat = max(op.id for op in trace.ops if op.target == "aten.cat.default")
    assert {gap.after for gap in ends.values()} == {last_cat}
    # cat1 is made of y0 alone, and is the last concatenation that the backward call reads.
    assert ends["y0"].before == len(trace.ops) - 1
    assert [ends[f"y{i}"].before - ends["y3"].before for i in range(4)] == [3, 2, 1, 0]


def decided(problem: Problem) -> set[int]:
    """The buffers whose dead gap `search` decides on."""
    space = make_space(problem, Evaluator(problem), 1)
    return {space.gaps[index].buffer for index in space.allowed if space.gaps[index].dead}


def test_what_is_about_as_large_as_what_it_makes_is_not_decided_on():
    y3 = by_name(DENSE)["y3"]
    buffers = DENSE.trace.buffers
    grown = tuple(replace(b, nbytes=4096 // WORTH + 1) if b.id == y3 else b for b in buffers)
    larger = replace(DENSE, trace=replace(DENSE.trace, buffers=grown))
    assert y3 in {gap.buffer for gap in dead(larger)}  # a plan may hold it nevertheless
    assert (y3 in decided(DENSE), y3 in decided(larger)) == (True, False)


def test_small_networks_may_have_none():
    assert dead(small_problem()) == ()


def test_they_are_dropped_unless_a_plan_says_more():
    gap = dead(DENSE)[0]
    assert default_choice(gap) == AGAIN
    assert make_plan({}).choice(gap) == AGAIN
    assert make_plan({gap: AGAIN}).choices == ()
    kept = make_plan({gap: KEEP})
    assert (kept.choices, kept.moves) == (((gap, KEEP),),) * 2
    assert make_plan({replace(gap, dead=False): KEEP}).choices == ()


def test_dropped_all_that_lies_before_runs_again():
    assert reruns(DENSE, program_of(AGAIN))["aten.convolution.default"] == 3 + 2 + 1 + 4


@pytest.mark.parametrize("choice", [KEEP, AWAY])
def test_kept_or_offloaded_only_the_large_run_again(choice):
    assert reruns(DENSE, program_of(choice)) == {"aten.cat.default": 4}


def test_made_again_once_they_stay_where_the_plan_says_so():
    """The first recomputation makes y1 to y3 on its way; none of them is made once more."""
    found = reruns(DENSE, program_of(Recompute(stay=True)))
    assert found["aten.convolution.default"] == 4


def test_kept_they_stay_until_their_last_recomputation_and_no_longer():
    program = program_of(KEEP)
    names = by_name(DENSE)
    freed = {}
    for position, instruction in enumerate(program.body):
        if isinstance(instruction.action, Free):
            freed[program.slots[instruction.action.slot].buffer] = position
    runs = {
        x.action.op: position
        for position, x in enumerate(program.body)
        if isinstance(x.action, Run) and not x.action.again
    }
    for gap in dead(DENSE):
        assert runs[gap.before - 1] < freed[gap.buffer] < runs[gap.before], names


def test_offloaded_they_leave_once_and_come_back_once():
    program = program_of(AWAY)
    slots = program.slots
    copies = [x.action for x in program.body if isinstance(x.action, Copy)]
    out = Counter(slots[c.source].buffer for c in copies if slots[c.target].tier is Tier.HOST)
    back = Counter(slots[c.target].buffer for c in copies if slots[c.target].tier is Tier.DEVICE)
    assert out == back == {gap.buffer: 1 for gap in dead(DENSE)}


def test_what_nobody_wants_after_all_is_given_up():
    """All concatenations are kept, so no op runs again."""
    program = program_of(AWAY, again=KEEP)
    assert reruns(DENSE, program) == {}
    made = {x.action.slot for x in program.body if isinstance(x.action, Alloc)}
    freed = {x.action.slot for x in program.body if isinstance(x.action, Free)}
    assert made - freed == set(program.results) & made


def test_a_plan_may_not_name_one_that_there_is_not():
    gap = dead(DENSE)[0]
    with pytest.raises(VerifyError, match=r"a choice is for a gap of the trace.*dead"):
        lower(DENSE, make_plan({replace(gap, before=gap.before - 1): KEEP}))


@pytest.mark.parametrize("kind", [KEEP_KIND, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY])
@pytest.mark.parametrize("other", [KEEP_KIND, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY])
def test_evaluated_to_the_last_bit(kind, other):
    for budget in (3000, 4500, 1 << 14):
        problem = dense_problem(budget_bytes=budget)
        evaluator = Evaluator(problem)
        kinds = [kind if gap.dead else other for gap in evaluator.gaps]
        found = evaluator.evaluate(kinds)
        program = lower(problem, evaluator.plan(kinds))
        timeline = simulate(problem, program)
        assert (found.seconds, found.peak_bytes) == (
            timeline.seconds,
            timeline.peak(Tier.DEVICE),
        )
        assert found.fits == fits(problem, program)


def unit_problem(trace: Trace, rate: float) -> Problem:
    """A problem in which each op takes a second, with `rate` bytes per second each way."""
    link = Link(rate)
    hardware = Hardware(
        "unit",
        ((Tier.DEVICE, 10**6), (Tier.HOST, 10**6)),
        ((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link)),
    )
    ops = len(trace.ops)
    profile = Profile((1.0,) * ops, (0,) * ops, Source.ESTIMATED)
    return Problem(trace, profile, hardware, 10**6)


@pytest.mark.parametrize("rate", [1e3, 2e5])
def test_room_given_up_after_an_op_serves_what_leaves_after_it(rate):
    """`a` is offloaded in vain; `e`, which leaves after the op that ends its gap, gets its room."""
    t = TraceBuilder()
    x = t.new(64, Role.INPUT, borrowed=True)
    a, c, d, e, b, f, g, h = (t.new(64, Role.ACTIVATION) for _ in range(8))
    y = t.new(128, Role.ACTIVATION)
    for reads, made in (
        ((x,), a), ((a,), y), ((x,), c), ((c,), d), ((d,), e),
        ((y, e), b), ((x,), f), ((f,), g), ((g, e), h),
    ):  # fmt: skip
        t.op("f", tuple(map(Ref, reads)), (made,))
    problem = unit_problem(t.trace([x], (Ref(b), Ref(h))), rate)
    evaluator = Evaluator(problem)
    offloaded = {(a, True), (e, False)}
    kinds = [
        OFFLOAD if (gap.buffer, gap.dead) in offloaded else default
        for gap, default in zip(evaluator.gaps, evaluator.default_kinds.tolist(), strict=True)
    ]
    assert kinds.count(OFFLOAD) == 2
    found = evaluator.evaluate(kinds)
    timeline = simulate(problem, lower(problem, evaluator.plan(kinds)))
    assert (found.seconds, found.outer_bytes) == (timeline.seconds, timeline.peak(Tier.HOST))
    assert found.outer_bytes == 256


def test_what_a_chain_makes_on_its_way_is_not_fetched():
    """The op that makes `w` also makes the dead `b`, and `v` is made of both."""
    t = TraceBuilder()
    x = t.new(64, Role.INPUT, borrowed=True)
    b = t.new(16, Role.ACTIVATION)
    w, v, out, more, last = (t.new(64, Role.ACTIVATION) for _ in range(5))
    t.op("f", (Ref(x),), (b, w))
    t.op("f", (Ref(b), Ref(w)), (v,))
    t.op("f", (Ref(x),), (out,))
    t.op("f", (Ref(out),), (more,))
    t.op("f", (Ref(w), Ref(v), Ref(more)), (last,))
    problem = unit_problem(t.trace([x], (Ref(last),)), 1e5)
    evaluator = Evaluator(problem)
    kinds = [OFFLOAD if gap.dead else RECOMPUTE for gap in evaluator.gaps]
    assert OFFLOAD in kinds
    plan = evaluator.plan(kinds)
    program = lower(problem, plan)
    copies = [x.action for x in program.body if isinstance(x.action, Copy)]
    assert [program.slots[copy.target].tier for copy in copies] == [Tier.HOST]
    found, timeline = evaluator.evaluate(kinds), simulate(problem, program)
    assert (found.seconds, found.peak_bytes) == (timeline.seconds, timeline.peak(Tier.DEVICE))


def test_what_is_made_again_in_no_time_is_not_decided_on():
    problem = DENSE
    assert decided(problem) == {gap.buffer for gap in dead(problem)}
    convolutions = {op.id for op in problem.trace.ops if op.target == "aten.convolution.default"}
    quick = tuple(
        1e-9 if op in convolutions else seconds
        for op, seconds in enumerate(problem.profile.seconds)
    )
    profile = replace(problem.profile, seconds=quick)
    assert decided(replace(problem, profile=profile)) == set()


def best_of_all(problem: Problem, dead_choices: tuple[Choice, ...]) -> float:
    """The seconds of the fastest plan without offloads, found by trying every plan."""
    found = gaps(problem.trace)
    every = [g for g in found if g.before >= problem.trace.boundary > g.after]
    options = [(KEEP, AGAIN)] * len(every) + [dead_choices] * len(dead(problem))
    best = float("inf")
    for choices in product(*options):
        plan = make_plan(dict(zip((*every, *dead(problem)), choices, strict=True)))
        program = lower(problem, plan, fast=True)
        if fits(problem, program):
            best = min(best, simulate(problem, program).seconds)
    return best


def test_search_finds_what_they_gain():
    problem = replace(dense_problem(4, 11 * 1024), host_budget_bytes=0)
    without, best = (best_of_all(problem, choices) for choices in ((AGAIN,), (AGAIN, KEEP)))
    plan = Search(min_bytes=1).plan(problem)
    assert simulate(problem, lower(problem, plan)).seconds == pytest.approx(best)
    assert best < without
    assert any(gap.dead for gap, _ in plan.moves)
