"""What a plan for larger sizes says about smaller ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from outcore.ir.plan import make_plan
from outcore.ir.profile import Source
from outcore.ir.trace import Role, Trace
from outcore.ir.verify_plan import verify_plan
from outcore.ir.verify_program import verify_program
from outcore.lower import lower
from outcore.runtime.graphs.lending import covers, scaled
from tests.pure.strategies import planned, problems, traces


def resized(trace: Trace, sizes: list[int]) -> Trace:
    """The trace with these sizes of its buffers, in turn, except for those of weights."""
    pairs = zip(trace.buffers, sizes * len(trace.buffers), strict=False)
    weights = Role.PARAM, Role.STATE
    made = (b if b.role in weights else replace(b, nbytes=n) for b, n in pairs)
    return replace(trace, buffers=tuple(made))


@given(traces())
def test_weights_of_another_size_are_another_network(trace: Trace) -> None:
    weights = [b for b in trace.buffers if b.role in (Role.PARAM, Role.STATE) and b.nbytes]
    assume(weights)
    less = tuple(replace(b, nbytes=b.nbytes // 2) if b in weights else b for b in trace.buffers)
    assert not covers(trace, replace(trace, buffers=less))


@given(traces(), st.lists(st.integers(0, 1 << 20), min_size=1))
def test_a_trace_covers_those_that_are_nowhere_larger(trace: Trace, sizes: list[int]) -> None:
    other = resized(trace, sizes)
    pairs = list(zip(trace.buffers, other.buffers, strict=True))
    assert covers(trace, trace)
    assert covers(trace, other) == all(a.nbytes >= b.nbytes for a, b in pairs)


@given(traces(), traces())
def test_a_trace_of_other_ops_is_not_covered(one: Trace, other: Trace) -> None:
    assume((one.reads, one.writes) != (other.reads, other.writes))
    assert not covers(one, resized(other, [0]))


@given(st.data())
def test_a_plan_for_a_trace_is_one_for_all_that_it_covers(data: st.DataObject) -> None:
    problem, plan, _ = data.draw(planned())
    smaller = replace(problem, trace=resized(problem.trace, [8]))
    again = make_plan(plan.by_gap, plan.policy, variants=plan.by_op)
    verify_plan(smaller, again)
    program = lower(smaller, again)
    verify_program(smaller, program)


@given(st.data())
def test_scaled_times_are_no_longer(data: st.DataObject) -> None:
    problem = data.draw(problems())
    profile, trace = problem.profile, problem.trace
    assert scaled(profile, trace, trace, on_cpu=False).seconds == profile.seconds
    less = scaled(profile, trace, resized(trace, [0]), on_cpu=False)
    assert all(a <= b for a, b in zip(less.seconds, profile.seconds, strict=True))
    assert less.workspace_bytes == profile.workspace_bytes
    assert less.source is Source.ESTIMATED
