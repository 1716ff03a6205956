"""Traces of one family share what does not depend on sizes, and identities go by sizes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.ir import family as families
from outcore.ir import identity
from outcore.ir.family import LENT, Family, family_of, once_per_family
from outcore.ir.hardware import Tier
from outcore.ir.identity import Identity
from outcore.ir.liveness import dead_gaps, gaps, liveness
from outcore.ir.memory import extent_bytes, held_bytes
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.ir.verify_program import verify_program
from outcore.lower import kept, lower, resized
from tests.pure.strategies import planned, problems, small_problem, small_trace


def grown(trace: Trace, factor: int) -> Trace:
    """The same trace with buffers of `factor` times the bytes."""
    buffers = tuple(replace(b, nbytes=factor * b.nbytes) for b in trace.buffers)
    return trace.resized(buffers, trace.values, trace.ops)


@given(problems(), st.integers(2, 5))
def test_what_is_shared_is_what_each_has(problem: Problem, factor: int) -> None:
    family, traces = Family(()), (problem.trace, grown(problem.trace, factor))
    alone = [grown(trace, 1) for trace in traces]
    for trace in traces:
        family.add(trace)
    for derive in (liveness, gaps, dead_gaps):
        assert [derive(trace) for trace in traces] == [derive(trace) for trace in alone]
    programs = [kept(replace(problem, trace=trace)) for trace in traces]
    for program, trace in zip(programs, alone, strict=True):
        known = lower(replace(problem, trace=trace), KEEP_ALL)
        assert program == replace(known, trace_digest="")
    assert programs[0].body is programs[1].body
    assert family.code_of(programs[0]) is family.code_of(programs[1]) is not None
    assert family.code_of(lower(problem, KEEP_ALL)) is None


@given(planned(), st.integers(2, 5))
def test_programs_for_larger_sizes_are_right_for_smaller_ones(
    made: tuple[Problem, Plan, Program], factor: int
) -> None:
    problem, plan, small = made
    large = replace(problem, trace=grown(problem.trace, factor))
    plan = replace(plan, problem_digest="", trace_digest="")
    program = lower(large, plan)
    found = resized(program, problem)
    assert found is not None
    verify_program(problem, found)
    assert found.body is program.body
    for tier in Tier:
        held = zip(held_bytes(problem, found, tier), held_bytes(large, program, tier), strict=True)
        assert all(here <= there for here, there in held)
        assert extent_bytes(found, tier) <= extent_bytes(program, tier)
    assert (resized(small, large) is None) == any(slot.nbytes for slot in small.slots)
    assert resized(small, problem) == replace(small, trace_digest="")


def test_few_lent_programs_are_remembered() -> None:
    family, problem = Family(()), small_problem()
    programs = [lower(problem, KEEP_ALL) for _ in range(LENT + 1)]
    for program in programs:
        family.lend(program)
        family.lend(program)
    first, *others = programs
    assert family.code_of(first) is None
    assert [each.program for each in family.lent] == others


def test_a_trace_without_a_family_shares_nothing() -> None:
    calls: list[Trace] = []
    counted = once_per_family(calls.append)
    trace = small_trace()
    counted(trace)
    counted(trace)
    assert len(calls) == 2
    assert family_of(trace) is None
    program = kept(replace(small_problem(), trace=trace))
    assert program.trace_digest == digest(trace)


def test_a_family_is_forgotten_with_its_traces() -> None:
    trace = small_trace()
    Family(()).add(trace)
    number = id(trace)
    assert number in families._families
    del trace
    assert number not in families._families


@given(problems())
def test_a_resized_trace_is_one_that_is_made_anew(problem: Problem) -> None:
    trace = problem.trace
    larger = grown(trace, 3)
    anew = replace(trace, buffers=larger.buffers)
    assert larger == anew
    assert (larger.reads, larger.writes) == (anew.reads, anew.writes)
    assert hash(larger) == hash(anew)


def test_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are the same if their digests are; those are needed only if sizes are the same."""
    trace = small_trace()
    renamed = replace(trace, ops=tuple(replace(op, site="elsewhere") for op in trace.ops))
    first, *others = trace.ops
    other = replace(trace, ops=(replace(first, target="aten.other.default"), *others))
    assert Identity(trace) == Identity(renamed)
    assert len({Identity(trace), Identity(renamed), Identity(other)}) == 2
    assert Identity(trace).digest == digest(renamed)
    assert Identity(trace) != digest(trace)
    monkeypatch.setattr(identity, "digest", lambda _: pytest.fail("not needed"))
    assert Identity(trace) == Identity(trace)
    assert Identity(trace) != Identity(grown(trace, 2))
