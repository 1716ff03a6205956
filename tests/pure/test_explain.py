"""explain: hand-worked cases, and properties of drawn problems and plans."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import outcore
from outcore.errors import InfeasibleError, VerifyError
from outcore.explain import Alternative, Explanation, Late, Total, Wait, WaitsFor, explain
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import dead_gaps, gaps, liveness
from outcore.ir.memory import fits
from outcore.ir.plan import KEEP, Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.store import load
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Donation, Effect, Phase, Ref, Role
from outcore.lower import lower
from outcore.planfile.check import check_saved
from outcore.policies import resolve
from outcore.simulate import simulate
from tests.conftest import CASES
from tests.pure.building import TraceBuilder, dense_plan, dense_problem, small_problem
from tests.pure.strategies import plans, problems, traces

pytestmark = pytest.mark.xdist_group("compiled")  # one process compiles, and only once

HOST = Tier.HOST
ROOMY = 10**6


def by_hand(
    reads: Sequence[Sequence[int]],
    budget: int = ROOMY,
    workspaces: dict[int, int] | None = None,
    sizes: dict[int, int] | None = None,
    unrepeatable: Sequence[int] = (),
) -> Problem:
    """A forward pass in which op i takes a second and makes buffer i + 1 of 1000 B from `reads[i]`.

    Buffer 0 is borrowed. 1000 B leave in a second, and come back in two.
    """
    t = TraceBuilder()
    t.new(250, Role.INPUT, borrowed=True, name="x")
    for op, read in enumerate(reads):
        made = t.new((sizes or {}).get(op + 1, 1000) // 4, Role.ACTIVATION, name=f"b{op + 1}")
        effects = [Effect.UNREPEATABLE] if op in unrepeatable else []
        t.op("f", tuple(Ref(buffer) for buffer in read), (made,), effects=effects)
    trace = t.trace([0], (Ref(len(reads)),))
    room = tuple((workspaces or {}).get(op, 0) for op in range(len(reads)))
    profile = Profile((1.0,) * len(reads), room, Source.ESTIMATED)
    return Problem(trace, profile, two_links(), budget)


def two_links() -> Hardware:
    return Hardware(
        "by hand",
        ((Tier.DEVICE, ROOMY), (HOST, ROOMY)),
        ((Tier.DEVICE, HOST, Link(1000.0)), (HOST, Tier.DEVICE, Link(500.0))),
    )


ONE_GAP = ((0,), (0,), (2,), (1, 3))
"""Buffer 1 is idle from op 0 to op 3."""
GAP = Gap(1, 0, 3)


def explained(problem: Problem, choices: dict[Gap, Choice]) -> Explanation:
    return explain(problem, make_plan(choices))


def only_wait(problem: Problem, choices: dict[Gap, Choice]) -> Wait:
    (wait,) = explained(problem, choices).waits
    return wait


class TestMovesByHand:
    def test_the_figures_of_each_alternative(self) -> None:
        (move,) = explained(by_hand(ONE_GAP), {GAP: Offload(HOST)}).moves
        assert (move.buffer, move.name, move.nbytes) == (1, "b1", 1000)
        assert (move.op, move.target, move.site) == (0, "f", "layers.0 (net.py:10)")
        assert (move.after, move.before, move.idle_seconds) == (0, 3, 2.0)
        assert (move.choice, move.weight) == ("offload", 2000.0)
        assert move.alternatives == (
            Alternative("keep", chosen=False, seconds=4.0, peak_bytes=4000),
            Alternative("offload", chosen=True, seconds=5.0, peak_bytes=4000),
            Alternative("recompute", chosen=False, seconds=5.0, peak_bytes=4000),
            Alternative("recompute stay", chosen=False, seconds=5.0, peak_bytes=4000),
        )
        assert move.reasons == (
            "if kept, the step takes 1.00 s less",
            "if recomputed, the step takes as long",
        )

    def test_what_does_not_fit(self) -> None:
        """Op 1 needs x, b1, b2 and 2000 B: 500 B too many with b1 kept."""
        problem = by_hand(ONE_GAP, budget=4500, workspaces={1: 2000})
        (move,) = explained(problem, {GAP: Recompute()}).moves
        kept, away, again, stay = move.alternatives
        assert (kept.over_bytes, kept.over_tier, kept.fits) == (500, Tier.DEVICE, False)
        assert away.fits
        assert (again.chosen, again.fits, again.peak_bytes) == (True, True, 4000)
        assert stay.fits
        assert move.reason == (
            "if kept, it would not fit: 500 B over; if offloaded, the step takes 1.00 s longer; "
            "if recomputed and then kept, the step takes as long"
        )

    def test_what_does_not_fit_on_the_host(self) -> None:
        problem = replace(by_hand(ONE_GAP), host_budget_bytes=600)
        (move,) = explained(problem, {GAP: Recompute()}).moves
        assert "if offloaded, it would not fit: 400 B over on the host" in move.reasons

    def test_what_does_not_fit_beside_the_buffers_for_copies_to_a_disk(self) -> None:
        """Buffer 3 is on the disk: its copies pass through four buffers on the host."""
        problem = replace(small_problem(budget_bytes=ROOMY), host_budget_bytes=4 * (1024 + 512))
        on_disk, other = gaps(problem.trace)[2:4]
        plan = make_plan({on_disk: Offload(Tier.DISK), other: Recompute()})
        check_saved(problem, plan)
        found = explain(problem, plan)
        assert found.over_bytes == 0
        (move,) = (move for move in found.moves if move.buffer == other.buffer)
        away = move.alternatives[1]
        assert (away.over_bytes, away.over_tier) == (1024, HOST)
        with pytest.raises(InfeasibleError):
            check_saved(problem, make_plan({**plan.by_gap, other: Offload(HOST)}))
        small = replace(problem, host_budget_bytes=100)
        assert explain(small, plan).over_tier is HOST

    def test_idle_time_is_that_of_the_variants_that_the_plan_chooses(self) -> None:
        problem = by_hand(ONE_GAP)
        alternatives = tuple((op, (Cost(5.0, 0),)) for op in range(4))
        profile = replace(problem.profile, alternatives=alternatives)
        plan = make_plan({GAP: Offload(HOST)}, variants={1: 1})
        (move,) = explain(replace(problem, profile=profile), plan).moves
        assert move.idle_seconds == 6.0

    def test_what_may_not_run_again(self) -> None:
        (move,) = explained(by_hand(ONE_GAP, unrepeatable=[0]), {GAP: Offload(HOST)}).moves
        assert [a.impossible for a in move.alternatives[2:]] == ["op 0 f is unrepeatable"] * 2
        assert [a.seconds for a in move.alternatives[2:]] == [None, None]
        assert not move.alternatives[2].fits
        assert move.reasons[1:] == ("if recomputed, it is impossible: op 0 f is unrepeatable",)

    def test_what_another_choice_rests_on(self) -> None:
        """b2 is recomputed from b1, which must then be fetched, or recomputed from x."""
        reads = ((0,), (1,), (0,), (0,), (2,), (1, 5))
        problem = by_hand(reads, unrepeatable=[0])
        choices: dict[Gap, Choice] = {Gap(1, 1, 5): Offload(HOST), Gap(2, 1, 4): Recompute()}
        moves = {move.buffer: move for move in explained(problem, choices).moves}
        assert moves[1].alternatives[2].impossible == "op 0 f is unrepeatable"
        assert moves[2].alternatives[2].chosen

    def test_what_rests_on_what_is_gone(self) -> None:
        """`a` can be offloaded but not recomputed: it is made of a caller's buffer that is gone."""
        t = TraceBuilder()
        x, given = t.new(250, Role.INPUT, borrowed=True), t.new(250, Role.INPUT)
        a, b, c = (t.new(250, Role.ACTIVATION) for _ in range(3))
        t.op("f", (Ref(given),), (a,))
        t.op("f", (Ref(x),), (b,))
        t.op("f", (Ref(a), Ref(b)), (c,))
        trace = t.trace([x, given], (Ref(c),))
        profile = Profile((1.0,) * 3, (0,) * 3, Source.ESTIMATED)
        problem = Problem(trace, profile, two_links(), ROOMY)
        (move,) = explained(problem, {Gap(a, 0, 2): Offload(HOST)}).moves
        gone = "buffer 1: the caller passed it in, and it is gone"
        assert move.alternatives[2].impossible == gone

    def test_where_there_is_no_outer_tier(self) -> None:
        problem = by_hand(ONE_GAP)
        alone = replace(problem.hardware, capacity_bytes=((Tier.DEVICE, ROOMY),), links=())
        (move,) = explained(replace(problem, hardware=alone), {GAP: Recompute()}).moves
        assert move.alternatives[1].impossible == "by hand has no disk tier"

    def test_what_the_caller_passes_in(self) -> None:
        t = TraceBuilder()
        x = t.new(250, Role.INPUT, name="x")
        a, b, c = (t.new(250, Role.ACTIVATION) for _ in range(3))
        t.op("f", (Ref(x),), (a,))
        t.op("f", (Ref(a),), (b,))
        t.op("f", (Ref(x), Ref(b)), (c,))
        profile = Profile((1.0,) * 3, (0,) * 3, Source.ESTIMATED)
        problem = Problem(t.trace([x], (Ref(c),)), profile, two_links(), ROOMY)
        explanation = explained(problem, {Gap(x, 0, 2): Offload(HOST)})
        (move,) = explanation.moves
        assert (move.op, move.target, move.site) == (None, "", "")
        assert move.alternatives[2].impossible == "the caller passes it in"
        assert "passed in by the caller" in str(explanation)

    def test_those_that_free_most_come_first(self) -> None:
        reads = ((0,), (0,), (0,), (0,), (1, 2))
        problem = by_hand(reads, sizes={2: 4000})
        choices: dict[Gap, Choice] = {Gap(1, 0, 4): Recompute(), Gap(2, 1, 4): Recompute()}
        explanation = explained(problem, choices)
        assert [(m.buffer, m.weight) for m in explanation.moves] == [(2, 8000.0), (1, 3000.0)]
        first = explain(problem, make_plan(choices), most=1)
        assert (first.moves, first.moved) == (explanation.moves[:1], 2)
        assert explain(problem, make_plan(choices), most=0).moves == ()

    def test_choices_to_keep_are_no_moves(self) -> None:
        explanation = explain(by_hand(ONE_GAP), Plan(((GAP, KEEP),)))
        assert (explanation.moved, explanation.moves, explanation.waits) == (0, (), ())
        assert "everything is kept" in str(explanation)
        assert "waits for nothing" in str(explanation)


class TestWaitsByHand:
    def test_for_a_copy_back_whose_copy_out_takes_its_time(self) -> None:
        """Out from 1 to 2 s, back from 2 to 4 s; op 3 could begin at 3 s."""
        wait = only_wait(by_hand(ONE_GAP), {GAP: Offload(HOST)})
        assert wait == Wait(
            WaitsFor.COPY_BACK,
            seconds=1.0,
            start_seconds=3.0,
            op=3,
            again=False,
            buffer=1,
            name="b1",
            nbytes=1000,
            copy_seconds=2.0,
            late=Late.COPY_OUT,
            behind=(),
            full_op=None,
            reason="before op 3 f for b1 (buffer 1) of 1000 B to come back: "
            "it was still on its way out",
        )

    def test_for_a_copy_back_that_the_plan_issues_late(self) -> None:
        wait = only_wait(by_hand(ONE_GAP), {GAP: Offload(HOST, prefetch=3)})
        assert (wait.waits_for, wait.late, wait.seconds) == (WaitsFor.COPY_BACK, Late.HINT, 2.0)

    def test_for_a_copy_back_that_had_no_room(self) -> None:
        """At op 2, its workspace, x, b2 and b3 leave no room for b1."""
        problem = by_hand(ONE_GAP, budget=4500, workspaces={2: 1000})
        wait = only_wait(problem, {GAP: Offload(HOST)})
        assert (wait.waits_for, wait.late, wait.full_op) == (WaitsFor.COPY_BACK, Late.MEMORY, 2)
        assert wait.seconds == 2.0
        assert wait.reason.endswith("there was no room for it along with op 2 f")

    def test_for_a_copy_back_behind_another(self) -> None:
        """Op 3 reads both: b2 is copied back from 3 to 5 s, and b1 from 5 to 7 s."""
        problem = by_hand(((0,), (0,), (0,), (1, 2)))
        choices: dict[Gap, Choice] = {Gap(1, 0, 3): Offload(HOST), Gap(2, 1, 3): Offload(HOST)}
        wait = only_wait(problem, choices)
        assert (wait.buffer, wait.late, wait.behind) == (1, Late.LINK, (2,))
        assert (wait.start_seconds, wait.seconds) == (3.0, 4.0)
        assert wait.reason.endswith("the link was busy with b2 (buffer 2)")

    def test_for_memory_that_a_copy_out_holds(self) -> None:
        """Op 1 needs all but 500 B: b1 must leave first, and can come back only after op 1."""
        problem = by_hand(ONE_GAP, budget=4500, workspaces={1: 2000})
        out, back = explained(problem, {GAP: Offload(HOST)}).waits
        assert (out.waits_for, out.late, out.op, out.seconds) == (
            WaitsFor.MEMORY,
            Late.TIME,
            1,
            1.0,
        )
        assert (back.waits_for, back.late, back.full_op) == (WaitsFor.COPY_BACK, Late.MEMORY, 1)

    def test_because_the_plan_asks(self) -> None:
        problem = by_hand(ONE_GAP)
        wait = only_wait(problem, {GAP: Offload(HOST, arrive=2)})
        assert (wait.waits_for, wait.op, wait.seconds) == (WaitsFor.PLAN, 2, 2.0)
        assert "to come back, as the plan asks" in wait.reason
        out = only_wait(problem, {GAP: Offload(HOST, release=1)})
        assert (out.waits_for, out.late, out.op) == (WaitsFor.PLAN, Late.TIME, 1)
        assert "to be out, as the plan asks" in out.reason

    def test_for_a_copy_out_that_the_plan_issues_late(self) -> None:
        wait, *_ = explained(by_hand(ONE_GAP), {GAP: Offload(HOST, depart=2, release=2)}).waits
        assert (wait.waits_for, wait.late, wait.op) == (WaitsFor.PLAN, Late.HINT, 2)

    def test_for_room_outside(self) -> None:
        """b2 gets the room of b1 on the host, and b1 is back only at 4 s."""
        problem = by_hand(((0,), (0,), (0,), (0,), (1,), (2,)))
        choices: dict[Gap, Choice] = {
            Gap(1, 0, 4): Offload(HOST, prefetch=1),
            Gap(2, 1, 5): Offload(HOST, release=2),
        }
        wait = explained(problem, choices).waits[0]
        assert (wait.buffer, wait.waits_for, wait.late) == (2, WaitsFor.PLAN, Late.ROOM)
        assert wait.behind == (1,)
        assert wait.seconds == 3.0

    def test_for_what_is_written_over_in_the_backward_call(self) -> None:
        """Op 3 writes its result over `a`, so `a` is fetched only in the backward call."""
        t = TraceBuilder()
        x = t.new(250, Role.INPUT, borrowed=True)
        a, b, out = (t.new(250, Role.ACTIVATION) for _ in range(3))
        t.op("f", (Ref(x),), (a,))
        t.op("f", (Ref(x),), (out,))
        t.op("f", (Ref(x),), (t.new(250, Role.ACTIVATION),))
        tangent = t.new(250, Role.GRAD)
        op = t.op("g", (Ref(a), Ref(tangent)), (b,), Phase.BACKWARD)
        t.donations.append(Donation(op, a, b))
        trace = t.trace([x], (Ref(out),), [tangent], (Ref(b),))
        profile = Profile((1.0,) * 4, (0,) * 4, Source.ESTIMATED)
        problem = Problem(trace, profile, two_links(), ROOMY)
        wait = only_wait(problem, {Gap(a, 0, 3): Offload(HOST)})
        assert (wait.waits_for, wait.late, wait.op) == (WaitsFor.COPY_BACK, Late.CALL, 3)
        assert wait.seconds == 2.0

    def test_before_an_op_that_runs_again(self) -> None:
        """b2 is recomputed from b1, which is fetched for that."""
        reads = ((0,), (1,), (0,), (0,), (2,), (1, 5))
        choices: dict[Gap, Choice] = {
            Gap(1, 1, 5): Offload(HOST, prefetch=4),
            Gap(2, 1, 4): Recompute(),
        }
        explanation = explained(by_hand(reads), choices)
        (wait,) = explanation.waits
        assert (wait.op, wait.again, wait.late) == (1, True, Late.HINT)
        assert "before op 1 f, run again, for b1" in wait.reason
        (rerun,) = explanation.reruns
        assert (rerun.op, rerun.target, rerun.times, rerun.seconds) == (1, "f", 1, 1.0)

    def test_at_the_end(self) -> None:
        """`a` is offloaded, but the rerun for `b` makes it again before its copy out is done."""
        t = TraceBuilder()
        x = t.new(250, Role.INPUT, borrowed=True)
        a, b = t.new(10000, Role.ACTIVATION), t.new(250, Role.ACTIVATION)
        t.op("f", (Ref(x),), (a, b))
        t.op("f", (Ref(x),), (t.new(250, Role.ACTIVATION),))
        last = t.new(250, Role.ACTIVATION)
        t.op("f", (Ref(a), Ref(b)), (last,))
        profile = Profile((1.0,) * 3, (0,) * 3, Source.ESTIMATED)
        problem = Problem(t.trace([x], (Ref(last),)), profile, two_links(), ROOMY)
        wait = only_wait(problem, {Gap(a, 0, 2): Offload(HOST), Gap(b, 0, 2): Recompute()})
        assert (wait.waits_for, wait.late, wait.op) == (WaitsFor.END, Late.TIME, None)
        assert (wait.start_seconds, wait.seconds) == (4.0, 37.0)
        assert wait.reason.startswith("at the end for buffer 1 of 39.1 KiB to be out")

    def test_the_causes_together(self) -> None:
        problem = by_hand(ONE_GAP, budget=4500, workspaces={1: 2000})
        explanation = explained(problem, {GAP: Offload(HOST)})
        assert set(explanation.totals) == {
            Total(WaitsFor.MEMORY, Late.TIME, 1, 1.0),
            Total(WaitsFor.COPY_BACK, Late.MEMORY, 1, 1.0),
        }
        assert explanation.stall_seconds == 2.0


# ---- properties ----------------------------------------------------------------------------------


def played(problem: Problem, plan: Plan) -> Timeline | None:
    """The simulated timeline of `plan`; None if the plan cannot be carried out."""
    try:
        return simulate(problem, lower(problem, plan, fast=True))
    except VerifyError as error:
        assert error.noun == "plan", error  # noqa: PT017 - any other noun is a defect
        return None


def changed(plan: Plan, gap: Gap, choice: Choice) -> Plan:
    return make_plan({**plan.by_gap, gap: choice}, variants=plan.by_op)


def others(problem: Problem, own: Choice) -> tuple[Choice, ...]:
    away = own if isinstance(own, Offload) else Offload(problem.hardware.outer)
    return KEEP, away, Recompute(), Recompute(stay=True)


def check_alternatives(problem: Problem, plan: Plan, explanation: Explanation) -> None:
    """Each alternative has the figures of the plan with this choice, lowered and simulated."""
    for move in explanation.moves:
        gap = Gap(move.buffer, move.after, move.before, move.dead)
        own = plan.choice(gap)
        for choice, found in zip(others(problem, own), move.alternatives, strict=True):
            assert found.chosen == (choice == own)
            timeline = played(problem, changed(plan, gap, choice))
            assert (timeline is None) == bool(found.impossible)
            if timeline is not None:
                assert found.seconds == timeline.seconds
                assert found.peak_bytes == timeline.peak(Tier.DEVICE)
                program = lower(problem, changed(plan, gap, choice), fast=True)
                assert found.fits == fits(problem, program)
            else:
                assert not found.fits


def check_sums(explanation: Explanation, timeline: Timeline) -> None:
    assert explanation.seconds == timeline.seconds
    parts = (
        explanation.in_core_seconds,
        explanation.variant_seconds,
        explanation.recompute_seconds,
        explanation.stall_seconds,
    )
    assert sum(parts) == pytest.approx(explanation.seconds, rel=1e-9, abs=1e-12)
    totals = sum(total.seconds for total in explanation.totals)
    assert totals == pytest.approx(explanation.stall_seconds, rel=1e-9, abs=1e-12)


def check_causes(problem: Problem, plan: Plan, explanation: Explanation) -> None:
    """The causes of waits agree with the choices and hints of the plan."""
    stop = 0.0
    for wait in explanation.waits:
        assert wait.start_seconds >= stop - 1e-9, "waits are in order, and apart"
        stop = wait.start_seconds + wait.seconds
        hints = [c for g, c in plan.choices if g.buffer == wait.buffer and isinstance(c, Offload)]
        assert hints, "only what is offloaded is copied"
        assert wait.late not in (Late.LINK, Late.ROOM) or wait.behind
        if wait.late is Late.HINT:
            assert any(c.prefetch is not None or c.depart is not None for c in hints)
        if wait.waits_for is WaitsFor.PLAN:
            assert any(c.arrive is not None or c.release is not None for c in hints)
        assert (wait.op is None) == (wait.waits_for is WaitsFor.END)


def check_no_want_of_room(problem: Problem, plan: Plan) -> None:
    """With an endless budget, nothing waits for device memory."""
    explanation = explain(replace(problem, budget_bytes=1 << 60), plan, most=0)
    for wait in explanation.waits:
        assert wait.waits_for is not WaitsFor.MEMORY
        assert wait.late is not Late.MEMORY
        assert wait.full_op is None


class TestWhatIsHeldForReruns:
    """Outputs of dense layers that are held to recompute the concatenations."""

    def test_the_figures_of_each_alternative(self) -> None:
        problem = dense_problem()
        plan = dense_plan(problem)
        explanation = explain(problem, plan)
        assert (explanation.moved, explanation.held) == (4, 3)
        held = {move.name: move for move in explanation.moves if move.dead}
        chosen = {name: move.choice for name, move in held.items()}
        assert chosen == {"y0": "keep", "y1": "offload", "y2": "recompute stay"}
        assert held["y0"].alternatives[0].chosen
        assert held["y0"].alternatives[2].seconds == pytest.approx(explanation.seconds + 40e-3)
        check_alternatives(problem, plan, explanation)

    def test_in_words(self, golden) -> None:
        problem = dense_problem()
        golden(str(explain(problem, dense_plan(problem))), "explain/dense")

    def test_what_cannot_be_made_again_can_be_held_and_dropped(self) -> None:
        problem = dense_problem(layers=2)
        first, *rest = problem.trace.ops
        once = replace(first, effects=frozenset({Effect.UNREPEATABLE}))
        problem = replace(problem, trace=replace(problem.trace, ops=(once, *rest)))
        (gap,) = dead_gaps(problem.trace)[:1]
        (move,) = explained(problem, {gap: KEEP}).moves
        assert not move.alternatives[2].impossible
        assert "op 0 aten.convolution.default is unrepeatable" in move.alternatives[3].impossible

    def test_what_is_recomputed_may_rest_on_it(self) -> None:
        problem = dense_problem(layers=2)
        first, *rest = problem.trace.ops
        once = replace(first, effects=frozenset({Effect.UNREPEATABLE}))
        problem = replace(problem, trace=replace(problem.trace, ops=(once, *rest)))
        moves = {move.name: move for move in explain(problem, dense_plan(problem)).moves}
        assert "op 0 aten.convolution.default is unrepeatable" in moves["y0"].reason
        assert "if dropped, it is impossible" in moves["y0"].reason


class TestAnyPlan:
    @settings(max_examples=40)
    @given(st.data())
    def test_is_explained_to_the_last_bit(self, data) -> None:
        """Plans with hints of all kinds, variants, and any tier."""
        problem = data.draw(traces(mutates=True).flatmap(problems))
        plan = data.draw(plans(problem))
        timeline = played(problem, plan)
        if timeline is None:
            reject()
        explanation = explain(problem, plan)
        check_sums(explanation, timeline)
        check_alternatives(problem, plan, explanation)
        check_causes(problem, plan, explanation)
        check_no_want_of_room(problem, plan)
        assert (explanation.over_bytes == 0) == fits(problem, lower(problem, plan, fast=True))
        assert json.loads(json.dumps(explanation.to_dict())) == explanation.to_dict()
        assert f"{explanation.moved} gaps" in str(explanation) or not explanation.moves

    @settings(max_examples=40)
    @given(st.data(), st.randoms(use_true_random=False))
    def test_that_arrays_can_say_is_explained_to_the_last_bit(self, data, dice) -> None:
        """With the hints `release` and `prefetch`, and variants."""
        problem = data.draw(traces(mutates=True).flatmap(problems))
        plan = sayable(problem, dice)
        timeline = played(problem, plan)
        if timeline is None:
            reject()
        explanation = explain(problem, plan)
        check_sums(explanation, timeline)
        check_alternatives(problem, plan, explanation)
        check_causes(problem, plan, explanation)


def test_a_copy_back_behind_a_free_names_what_that_waits_for() -> None:
    """A drawn case: the copy back is behind the free of a slot whose copy out is not done yet."""
    case = CASES / "explain"
    problem = load(case / "freed_on_the_way_in.problem.json", Problem)
    plan = load(case / "freed_on_the_way_in.plan.json", Plan)
    explanation = explain(problem, plan)
    check_causes(problem, plan, explanation)
    assert [wait.behind for wait in explanation.waits if wait.late is Late.LINK] == [(6,)]


def sayable(problem: Problem, dice: random.Random) -> Plan:
    """A random plan with variants, and only the hints that the evaluator's arrays can hold."""
    live = liveness(problem.trace)
    outer = problem.hardware.outer
    choices: dict[Gap, Choice] = {}
    for gap in (*gaps(problem.trace), *dead_gaps(problem.trace)):
        inside = [None, *range(gap.after + 1, gap.before + 1)]
        away = Offload(outer, release=dice.choice(inside), prefetch=dice.choice(inside))
        made = live.producer[gap.buffer]
        again = made is not None and problem.trace.ops[made].repeatable
        some = (KEEP, away, Recompute(), Recompute(stay=True))
        choices[gap] = dice.choice(some if again else some[:2])
    known = problem.profile.alternatives
    variants = {op: dice.randint(0, len(costs)) for op, costs in known}
    return make_plan(choices, variants=variants)


# ---- forms ---------------------------------------------------------------------------------------


def test_variants_have_a_part_of_their_own() -> None:
    problem = by_hand(ONE_GAP)
    faster = replace(problem.profile, alternatives=((1, (Cost(0.25, 64),)),))
    problem = replace(problem, profile=faster)
    explanation = explain(problem, make_plan({GAP: Recompute()}, variants={1: 1}))
    assert (explanation.in_core_seconds, explanation.variant_seconds) == (4.0, -0.75)
    assert (explanation.seconds, explanation.recompute_seconds) == (4.25, 1.0)
    assert [a.seconds for a in explanation.moves[0].alternatives[2:]] == [4.25, 4.25]
    assert "by the choice of algorithms" in str(explanation)


def test_a_plan_that_does_not_fit_is_explained_all_the_same() -> None:
    problem = by_hand(ONE_GAP, budget=1000)
    explanation = explained(problem, {GAP: Offload(HOST)})
    assert (explanation.over_bytes, explanation.over_tier) == (3000, Tier.DEVICE)
    assert "does not fit: 2.93 KiB over on the device" in str(explanation)


def test_of_a_policy(golden) -> None:
    problem = small_problem(6144)
    plan = resolve("swap-all{min_bytes=1B}").plan(problem)
    explanation = outcore.explain(problem, plan)
    assert isinstance(explanation, outcore.Explanation)
    golden(str(explanation), "explain/small")


def test_a_plan_for_another_trace_is_refused() -> None:
    problem = small_problem()
    with pytest.raises(outcore.DigestError):
        explain(by_hand(ONE_GAP), resolve("swap-all").plan(problem))
