"""Evaluator: the same figures as `simulate(lower(...))`, bit for bit, compiled or not."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore import jit
from outcore.errors import VerifyError
from outcore.evaluate import (
    KEEP,
    NO_HINT,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_STAY,
    Evaluation,
    Evaluator,
)
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import liveness
from outcore.ir.memory import fits
from outcore.ir.plan import Gap, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Copy
from outcore.ir.trace import Phase, Ref, Role, Trace
from outcore.lower import lower
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, small_hardware, small_problem
from tests.pure.strategies import problems, traces

pytestmark = pytest.mark.xdist_group("compiled")  # one process compiles, and only once

IMPOSSIBLE = Evaluation(math.inf, 0, 0, fits=False)


def reference(problem: Problem, plan: Plan) -> Evaluation:
    """The evaluation of `plan` by lowering and simulating it."""
    try:
        program = lower(problem, plan, fast=True)
    except VerifyError as error:
        assert error.noun == "plan", error  # noqa: PT017 - any other noun is a defect
        return IMPOSSIBLE
    timeline = simulate(problem, program)
    outer = timeline.peak(problem.hardware.outer)
    peak = timeline.peak(Tier.DEVICE)
    return Evaluation(timeline.seconds, peak, outer, fits(problem, program))


def may_recompute(problem: Problem, gap: Gap) -> bool:
    producer = liveness(problem.trace).producer[gap.buffer]
    return producer is not None and problem.trace.ops[producer].repeatable


WEIGHTS = ((1, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (0, 1, 0, 0), (0, 0, 1, 1))


def some_kinds(problem: Problem, gaps: tuple[Gap, ...], dice: random.Random) -> list[int]:
    """Kinds for all gaps, some more likely than others; now and then one that is not allowed."""
    weights = dice.choice(WEIGHTS)
    careless = dice.random() < 0.1
    return [
        dice.choices(range(4), weights)[0]
        if careless or may_recompute(problem, gap)
        else dice.choice((KEEP, OFFLOAD))
        for gap in gaps
    ]


def some_hints(gaps: tuple[Gap, ...], dice: random.Random) -> list[int]:
    return [dice.choice((NO_HINT, dice.randint(g.after + 1, g.before))) for g in gaps]


class TestFigures:
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(traces(mutates=True).flatmap(problems), st.randoms(use_true_random=False))
    def test_are_those_of_the_program_with_dead_gaps(self, problem, dice) -> None:
        evaluator = Evaluator(problem)
        assume(any(gap.dead for gap in evaluator.gaps))
        for _ in range(5):
            kinds = some_kinds(problem, evaluator.gaps, dice)
            for index, gap in enumerate(evaluator.gaps):
                if gap.dead and dice.random() < 0.7:
                    kinds[index] = dice.choice((OFFLOAD, OFFLOAD, KEEP))
            plan = evaluator.plan(kinds)
            assert evaluator.evaluate(kinds) == reference(problem, plan)

    @settings(max_examples=100)
    @given(traces(mutates=True).flatmap(problems), st.randoms(use_true_random=False))
    def test_are_those_of_the_program(self, problem, dice) -> None:
        evaluator = Evaluator(problem)
        for _ in range(3):
            kinds = some_kinds(problem, evaluator.gaps, dice)
            plan = evaluator.plan(kinds)
            assert evaluator.evaluate(kinds) == reference(problem, plan)

    @settings(max_examples=100)
    @given(traces(mutates=True).flatmap(problems), st.randoms(use_true_random=False))
    def test_are_those_of_the_program_with_hints(self, problem, dice) -> None:
        evaluator = Evaluator(problem)
        for _ in range(3):
            kinds = some_kinds(problem, evaluator.gaps, dice)
            release, prefetch = (some_hints(evaluator.gaps, dice) for _ in range(2))
            plan = evaluator.plan(kinds, release=release, prefetch=prefetch)
            found = evaluator.evaluate(kinds, release=release, prefetch=prefetch)
            assert found == reference(problem, plan)

    def test_by_hand(self) -> None:
        """Four ops of 1 s; `a` is away for two of them, and takes 2 s to come back.

        With enough room, the copy back begins when the copy out is done, 1 s before its use.
        """
        t = TraceBuilder()
        x = t.new(250, Role.INPUT, borrowed=True)
        a, b, c, d = (t.new(250, Role.ACTIVATION) for _ in range(4))
        t.op("f", (Ref(x),), (a,))
        t.op("f", (Ref(x),), (b,))
        t.op("f", (Ref(b),), (c,))
        t.op("f", (Ref(a), Ref(c)), (d,))
        trace = t.trace([x], (Ref(d),))
        out, back = Link(1000.0), Link(500.0)
        hardware = Hardware(
            "by hand",
            ((Tier.DEVICE, 10**6), (Tier.HOST, 10**6)),
            ((Tier.DEVICE, Tier.HOST, out), (Tier.HOST, Tier.DEVICE, back)),
        )
        profile = Profile((1.0,) * 4, (0, 0, 0, 500), Source.ESTIMATED)
        evaluator = Evaluator(Problem(trace, profile, hardware, 10**6))
        assert evaluator.gaps == (Gap(1, 0, 3),)
        assert evaluator.evaluate([KEEP]) == Evaluation(4.0, 4500, 0, fits=True)
        assert evaluator.evaluate([OFFLOAD]) == Evaluation(5.0, 4500, 1000, fits=True)
        assert evaluator.evaluate([RECOMPUTE]) == Evaluation(5.0, 4500, 0, fits=True)

    def test_of_nothing(self) -> None:
        evaluator = Evaluator(_unit(TraceBuilder().trace([], ())))
        assert evaluator.evaluate([]) == Evaluation(0.0, 0, 0, fits=True)

    def test_do_not_depend_on_plans_before(self) -> None:
        problem = small_problem()
        evaluator, dice = Evaluator(problem), random.Random(1)
        plans = [some_kinds(problem, evaluator.gaps, dice) for _ in range(50)]
        first = [evaluator.evaluate(kinds) for kinds in plans]
        assert [evaluator.evaluate(kinds) for kinds in reversed(plans)] == first[::-1]
        assert [Evaluator(problem).evaluate(kinds) for kinds in plans] == first


def deep_problem(layers: int) -> Problem:
    """A chain of `layers` ops, whose results the backward call reads once more."""
    t = TraceBuilder()
    values = [t.new(64, Role.INPUT, borrowed=True)]
    for _ in range(layers):
        values.append(t.new(64, Role.ACTIVATION))
        t.op("test.layer", (Ref(values[-2]),), (values[-1],))
    grad = tangent = t.new(64, Role.GRAD)
    for value in reversed(values[1:-1]):
        made = t.new(64, Role.GRAD)
        t.op("test.layer_backward", (Ref(grad), Ref(value)), (made,), Phase.BACKWARD)
        grad = made
    trace = t.trace(values[:1], (Ref(values[-1]),), [tangent], (Ref(grad),))
    profile = Profile((1e-3,) * len(trace.ops), (0,) * len(trace.ops), Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), 1 << 20)


class TestLongPlans:
    @pytest.mark.parametrize("kind", [RECOMPUTE, RECOMPUTE_STAY])
    def test_tables_grow(self, kind) -> None:
        """With RECOMPUTE, the chain runs again from its start for each op: 741 runs of 39 ops."""
        problem = deep_problem(40)
        evaluator = Evaluator(problem)
        kinds = [kind] * len(evaluator.gaps)
        space = evaluator.runner.space
        found = evaluator.evaluate(kinds)
        assert kind == RECOMPUTE_STAY or evaluator.runner.space > space
        assert found == reference(problem, evaluator.plan(kinds))
        assert evaluator.evaluate(kinds) == found

    def test_tables_have_room_for_what_comes_back_if_no_op_makes_anything(self) -> None:
        t = TraceBuilder()
        x = t.new(64, Role.INPUT)
        for op in range(9):
            t.op("test.reads", (Ref(x),) if op % 3 == 0 else (), ())
        trace = t.trace([x], ())
        profile = Profile((1e-3,) * len(trace.ops), (0,) * len(trace.ops), Source.ESTIMATED)
        problem = Problem(trace, profile, small_hardware(), 1 << 20)
        evaluator = Evaluator(problem)
        kinds = [OFFLOAD] * len(evaluator.gaps)
        assert evaluator.evaluate(kinds) == reference(problem, evaluator.plan(kinds))

    def test_what_a_chain_makes_again_is_not_fetched_for_it(self) -> None:
        """The rerun of op 1 reads the `b` that the rerun of op 0, for `w`, makes again."""
        t = TraceBuilder()
        x = t.new(64, Role.INPUT, borrowed=True)
        b, w, v = (t.new(4096, Role.ACTIVATION) for _ in range(3))
        out = [t.new(64, Role.ACTIVATION) for _ in range(5)]
        t.op("f", (Ref(x),), (b, w))
        t.op("f", (Ref(b), Ref(w)), (v,))
        t.op("f", (Ref(x),), (out[0],))
        t.op("f", (Ref(v),), (out[1],))
        t.op("f", (Ref(x),), (out[2],))
        t.op("f", (Ref(b), Ref(w)), (out[3],))
        problem = _unit(t.trace([x], tuple(Ref(value) for value in out[:4])))
        evaluator = Evaluator(problem)
        assert [gap.buffer for gap in evaluator.gaps] == [1, 2, 3]
        kinds = [OFFLOAD, RECOMPUTE, RECOMPUTE]
        plan = evaluator.plan(kinds)
        program = lower(problem, plan)
        copies = [e.action for e in program.body if isinstance(e.action, Copy)]
        assert [program.slots[copy.target].tier for copy in copies] == [Tier.HOST]
        assert evaluator.evaluate(kinds) == reference(problem, plan)

    def test_rooms_in_the_outer_tier_are_used_again(self) -> None:
        """Two of three buffers are back before the third leaves, which reuses their room."""
        t = TraceBuilder()
        x = t.new(64, Role.INPUT, borrowed=True)
        a, b, c = (t.new(n, Role.ACTIVATION) for n in (64, 32, 96))
        out = [t.new(16, Role.ACTIVATION) for _ in range(8)]
        t.op("f", (Ref(x),), (a,))
        t.op("f", (Ref(x),), (b,))
        t.op("f", (Ref(x),), (out[0],))
        t.op("f", (Ref(a),), (out[1],))
        t.op("f", (Ref(b),), (out[2],))
        t.op("f", (Ref(x),), (c,))
        t.op("f", (Ref(x),), (out[3],))
        t.op("f", (Ref(c),), (out[4],))
        trace = t.trace([x], tuple(Ref(v) for v in out[:5]))
        profile = Profile((1e-3,) * len(trace.ops), (0,) * len(trace.ops), Source.ESTIMATED)
        problem = Problem(trace, profile, small_hardware(), 1 << 20)
        evaluator = Evaluator(problem)
        kinds = [OFFLOAD] * len(evaluator.gaps)
        assert evaluator.evaluate(kinds).outer_bytes == 4 * 96
        assert evaluator.evaluate(kinds) == reference(problem, evaluator.plan(kinds))


class TestWhatCannotBe:
    def test_recomputing_what_no_op_makes(self) -> None:
        t = TraceBuilder()
        x, y, z = (t.new(64, role) for role in (Role.INPUT, *[Role.ACTIVATION] * 2))
        t.op("f", (Ref(x),), (y,))
        t.op("f", (Ref(y),), (z,))
        made = t.new(64, Role.ACTIVATION)
        t.op("f", (Ref(x), Ref(z)), (made,))
        evaluator = Evaluator(_unit(t.trace([x], (Ref(made),))))
        assert [gap.buffer for gap in evaluator.gaps] == [0]
        assert evaluator.evaluate([RECOMPUTE]) == IMPOSSIBLE
        assert evaluator.evaluate([OFFLOAD]) != IMPOSSIBLE

    def test_recomputing_from_what_is_gone(self) -> None:
        """The op that makes `y` reads the caller's `x`, which is freed after this only use.

        `y` can be recomputed if `x` is held for that.
        """
        t = TraceBuilder()
        x, borrowed = t.new(64, Role.INPUT), t.new(64, Role.INPUT, borrowed=True)
        y, z, made = (t.new(64, Role.ACTIVATION) for _ in range(3))
        t.op("f", (Ref(x),), (y,))
        t.op("f", (Ref(borrowed),), (z,))
        t.op("f", (Ref(y), Ref(z)), (made,))
        problem = _unit(t.trace([x, borrowed], (Ref(made),)))
        evaluator = Evaluator(problem)
        assert [(gap.buffer, gap.dead) for gap in evaluator.gaps] == [(x, True), (y, False)]
        dropped, held = [RECOMPUTE, RECOMPUTE], [KEEP, RECOMPUTE]
        assert evaluator.evaluate(dropped) == IMPOSSIBLE
        with pytest.raises(VerifyError, match="can be made again from what is left"):
            lower(problem, evaluator.plan(dropped))
        assert evaluator.evaluate(held) == reference(problem, evaluator.plan(held))

    def test_a_kind_that_is_none(self) -> None:
        evaluator = Evaluator(small_problem())
        kinds = [KEEP] * len(evaluator.gaps)
        kinds[0] = 7
        assert evaluator.evaluate(kinds) == IMPOSSIBLE
        with pytest.raises(ValueError, match="7 is no kind"):
            evaluator.plan(kinds)

    def test_what_takes_longer_than_the_limit_or_does_not_fit(self) -> None:
        problem = deep_problem(20)
        evaluator = Evaluator(problem)
        kinds = np.where(evaluator.default_kinds == KEEP, RECOMPUTE, evaluator.default_kinds)
        whole = evaluator.evaluate(kinds)
        assert whole.seconds < float("inf")
        assert evaluator.evaluate(kinds, limit=whole.seconds / 2) == IMPOSSIBLE
        within = evaluator.evaluate(kinds, limit=whole.seconds)
        assert within == (whole if whole.fits else IMPOSSIBLE)
        tight = Evaluator(replace(problem, budget_bytes=whole.peak_bytes - 1))
        assert tight.evaluate(kinds, limit=1e9) == IMPOSSIBLE

    @pytest.mark.parametrize("hint", ["release", "prefetch"])
    def test_a_hint_outside_its_gap(self, hint) -> None:
        evaluator = Evaluator(small_problem())
        size = len(evaluator.gaps)
        hints: dict[str, Any] = {hint: [gap.after for gap in evaluator.gaps]}
        assert evaluator.evaluate([OFFLOAD] * size, **hints) == IMPOSSIBLE
        assert evaluator.evaluate([KEEP] * size, **hints).fits

    def test_offloading_where_there_is_nothing_but_the_device(self) -> None:
        problem = small_problem()
        alone = replace(
            problem.hardware, capacity_bytes=problem.hardware.capacity_bytes[:1], links=()
        )
        problem = replace(problem, hardware=alone)
        evaluator = Evaluator(problem)
        kinds = [KEEP] * len(evaluator.gaps)
        assert evaluator.evaluate(kinds) != IMPOSSIBLE
        kinds[0] = OFFLOAD
        assert evaluator.evaluate(kinds) == IMPOSSIBLE

    def test_too_few_kinds(self) -> None:
        evaluator = Evaluator(small_problem())
        with pytest.raises(ValueError, match="gaps"):
            evaluator.evaluate([KEEP])
        with pytest.raises(ValueError, match="gaps"):
            evaluator.evaluate([KEEP] * len(evaluator.gaps), release=[NO_HINT])

    def test_a_host_without_room_does_not_fit(self) -> None:
        problem = replace(small_problem(1 << 20), host_budget_bytes=1)
        evaluator = Evaluator(problem)
        found = evaluator.evaluate([OFFLOAD] * len(evaluator.gaps))
        assert math.isfinite(found.seconds)
        assert not found.fits


def _unit(trace: Trace) -> Problem:
    count = len(trace.ops)
    profile = Profile((1e-3,) * count, (0,) * count, Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), 1 << 20)


def test_plan_says_what_the_kinds_say() -> None:
    evaluator = Evaluator(small_problem())
    assert len(evaluator.gaps) == 5
    kinds = np.array([KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, OFFLOAD], dtype=np.int8)
    second, last = evaluator.gaps[1], evaluator.gaps[4]
    release = [NO_HINT, second.before, *[NO_HINT] * 3]
    prefetch = [*[NO_HINT] * 4, last.before]
    plan = evaluator.plan(kinds, "mine{}", release=release, prefetch=prefetch)
    assert dict(plan.choices) == {
        second: Offload(Tier.HOST, release=second.before),
        evaluator.gaps[2]: Recompute(),
        evaluator.gaps[3]: Recompute(stay=True),
        last: Offload(Tier.HOST, prefetch=last.before),
    }
    assert plan.policy == "mine{}"
    assert plan.trace_digest
    assert plan.problem_digest


WITHOUT_NUMBA = """
import random, sys
sys.modules["numba"] = None
from outcore import jit
from outcore.evaluate import KEEP, Evaluator
from outcore.policies.search.space import make_space
from tests.pure.building import small_problem
from tests.pure.test_evaluate import deep_problem, reference, some_kinds, some_hints
assert not jit.COMPILED
dice = random.Random(5)
for problem in (small_problem(), small_problem(5000), deep_problem(20)):
    evaluator = Evaluator(problem)
    for _ in range(20):
        kinds = some_kinds(problem, evaluator.gaps, dice)
        hints = {name: some_hints(evaluator.gaps, dice) for name in ("release", "prefetch")}
        found = evaluator.evaluate(kinds, **hints)
        assert found == reference(problem, evaluator.plan(kinds, **hints)), kinds
    space = make_space(problem, evaluator, 1)
    walk = evaluator.walk(space.allowed, space.alike, 1)
    walk.begin([KEEP] * len(space.gaps), float("inf"))
    kinds, seconds = walk.go(100, 1e-2, 1e-4)
    assert seconds == float("inf") or seconds == evaluator.evaluate(kinds).seconds
"""


def test_python_alone_has_the_same_figures() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True)


def test_what_cannot_be_kept_on_disk_is_compiled_all_the_same(monkeypatch) -> None:
    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(jit, "njit", njit)
    monkeypatch.setattr(jit, "ENTRIES", [])
    for decorator in (jit.compiled, jit.entry("i8[:]")):
        made: object = decorator(len)
        assert made == ("compiled", len)


@pytest.mark.skipif(not jit.COMPILED, reason="numba is an extra")
def test_a_disk_that_is_full_leaves_machine_code_in_memory(monkeypatch) -> None:
    from numba.core.caching import IndexDataCacheFile  # noqa: PLC0415 - an extra

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    monkeypatch.setattr(jit, "ENTRIES", [])
    function = jit.entry("i8")(lambda number: number + 1)
    assert function(1) == 2


def test_numba_may_be_told_to_compile_nothing() -> None:
    code = "from outcore.evaluate import walk"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_importing_does_not_import_numba() -> None:
    code = "import sys, outcore.evaluate; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
