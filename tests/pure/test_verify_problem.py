"""verify_problem: each rule of a problem, with its profile and hardware."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given

from outcore.errors import VerifyError
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost
from outcore.ir.text import parse, to_text
from outcore.ir.verify_problem import verify_problem
from tests.pure.strategies import problems, small_problem


@given(problems())
def test_drawn_problems_pass(problem: Problem) -> None:
    verify_problem(problem)


@pytest.mark.parametrize(
    ("old", "new", "noun", "where", "rule"),
    [
        ("op 8 0.001 s 128 B\n", "", "profile", "seconds", "there is one figure per op"),
        ("op 3 0.001 s", "op 3 -0.001 s", "profile", "op 3", "seconds are finite and not negative"),
        ("op 3 0.001 s", "op 3 inf s", "profile", "op 3", "seconds are finite and not negative"),
        ("op 3 0.001 s", "op 3 nan s", "profile", "op 3", "seconds are finite and not negative"),
        ("op 3 0.001 s 128 B", "op 3 0.001 s -1 B", "profile", "op 3", "no size is negative"),
        ("budget 8192", "budget 0", "problem", "the device budget", "the device budget is"),
        ("budget 8192", "budget -1", "problem", "the device budget", "the device budget is"),
        ("8192 B", "8192 B host -1 B", "problem", "the host budget", "no size is negative"),
        ("8192 B", "8192 B disk -1 B", "problem", "the disk budget", "no size is negative"),
        ("8192 B", "8192 B outside -1 B", "problem", "the bytes outside", "no size is negative"),
        ("8192 B", "8192 B between -1 B", "problem", "the bytes between", "no size is negative"),
        ("host 65536 B", "host -1 B", "hardware", "capacity host", "no size is negative"),
        ("padding 0 B", "padding -1 B", "hardware", "padding", "no size is negative"),
        ("disk 512 B", "disk 0 B", "hardware", "rounding disk", "slots are rounded to a positive"),
        ("disk 500000.0", "disk 0.0", "hardware", "link device disk", "a link has a positive rate"),
        ("disk 500000.0", "disk nan", "hardware", "link device disk", "a link has a positive rate"),
        ("B/s 0.0001 s", "B/s -1.0 s", "hardware", "link device host", "a link has a"),
        ("B/s 0.0001 s", "B/s inf s", "hardware", "link device host", "a link has a positive rate"),
        ("capacity host", "capacity disk", "hardware", "capacity disk", "each is listed once"),
        ("rounding disk", "rounding disk 2 B\nrounding disk", "hardware", "rounding disk", "each"),
        ("link host device", "link device host", "hardware", "link device host", "each is listed"),
        ("link device host", "link host disk", "hardware", "capacity host", "a tier with room is"),
        ("link host device", "link host disk", "hardware", "capacity host", "a tier with room is"),
        ("link disk device", "link disk host", "hardware", "capacity disk", "a tier with room is"),
    ],
)  # fmt: skip
def test_each_rule_of_a_problem(old: str, new: str, noun: str, where: str, rule: str) -> None:
    text = to_text(small_problem())
    assert old in text
    problem = parse(text.replace(old, new, 1), Problem)
    with pytest.raises(VerifyError) as caught:
        verify_problem(problem)
    assert (caught.value.noun, caught.value.where) == (noun, where)
    assert caught.value.rule.startswith(rule)


SOME = (Cost(5e-4, 4096),)


@pytest.mark.parametrize(
    ("alternatives", "where", "rule"),
    [
        (((-1, SOME),), "op -1", "alternatives are of ops of the trace"),
        (((9, SOME),), "op 9", "alternatives are of ops of the trace"),
        (((4, SOME), (3, SOME)), "op 3", "alternatives are sorted by op, each op listed once"),
        (((3, SOME), (3, SOME)), "op 3", "alternatives are sorted by op, each op listed once"),
        (((3, ()),), "op 3", "an op that is listed has an alternative"),
        (((3, (*SOME, Cost(-1e-9, 0))),), "op 3 variant 2", "seconds are finite and not negative"),
        (((3, (Cost(math.inf, 0),)),), "op 3 variant 1", "seconds are finite and not negative"),
        (((3, (Cost(math.nan, 0),)),), "op 3 variant 1", "seconds are finite and not negative"),
        (((3, (Cost(0.0, -1),)),), "op 3 variant 1", "no size is negative"),
    ],
)
def test_each_rule_of_alternatives(
    alternatives: tuple[tuple[int, tuple[Cost, ...]], ...], where: str, rule: str
) -> None:
    problem = small_problem()
    profile = dataclasses.replace(problem.profile, alternatives=alternatives)
    with pytest.raises(VerifyError) as caught:
        verify_problem(dataclasses.replace(problem, profile=profile))
    error = caught.value
    assert (error.noun, error.where, error.rule) == ("profile", where, rule)


@pytest.mark.parametrize("field", ["seconds", "workspace_bytes"])
def test_each_op_has_both_figures(field: str) -> None:
    problem = small_problem()
    short: dict[str, Any] = {field: getattr(problem.profile, field)[1:]}
    profile = dataclasses.replace(problem.profile, **short)
    with pytest.raises(VerifyError, match="8 figures for 9 ops"):
        verify_problem(dataclasses.replace(problem, profile=profile))


def test_a_tier_without_room_needs_no_link() -> None:
    text = to_text(small_problem()).replace("capacity host 65536 B", "capacity host 0 B")
    lines = [line for line in text.splitlines() if not line.startswith("link device host")]
    verify_problem(parse("\n".join(lines), Problem))
