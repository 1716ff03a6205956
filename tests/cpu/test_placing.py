"""Placing: what reports say of a layout that does not work."""

from __future__ import annotations

from typing import Any

import pytest

from outcore.ir.program import Copy, Program, Run
from outcore.ir.trace import Trace
from outcore.lower import lower
from outcore.policies import resolve
from outcore.runtime.budget.placing import MOST_LOST, Placing
from tests.pure.building import dense_problem


@pytest.fixture
def step() -> tuple[Trace, Program]:
    problem = dense_problem()
    return problem.trace, lower(problem, resolve("swap-all{min_bytes=1B}").plan(problem))


def told(times: int, step: tuple[Trace, Program], what: str, position: int | None) -> str:
    nothing: Any = None
    placing = Placing(nothing, nothing)
    for _ in range(times):
        placing._told(*step, what, position)
    return placing.note


def test_the_note_names_the_op_that_asked(step: tuple[Trace, Program]) -> None:
    trace, program = step
    actions = [instruction.action for instruction in program.body]
    position, op = next((i, a.op) for i, a in enumerate(actions) if isinstance(a, Run))
    assert told(MOST_LOST, step, "slot 3", position).endswith(f"slot 3, for {trace.ops[op].target}")
    position = next(i for i, a in enumerate(actions) if isinstance(a, Copy))
    assert told(MOST_LOST, step, "slot 3", position).endswith("slot 3, for a copy back")
    assert told(MOST_LOST, step, "no free range", None).endswith("the latest: no free range")
    assert not told(MOST_LOST - 1, step, "slot 3", position)
    assert not told(MOST_LOST, step, "", None)
