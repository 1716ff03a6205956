"""Placing: what reports say of a layout that does not work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.ir.program import Copy, Program, Run
from outcore.ir.trace import Trace
from outcore.lower import lower
from outcore.policies import resolve
from outcore.runtime.budget.placing import MOST_LOST, STARVED, Placing
from tests.pure.building import dense_problem


@pytest.fixture
def step() -> tuple[Trace, Program]:
    problem = dense_problem()
    return problem.trace, lower(problem, resolve("swap-all{min_bytes=1B}").plan(problem))


def told(times: int, step: tuple[Trace, Program], what: str, position: int | None) -> str:
    nothing: Any = None
    placing = Placing(nothing, nothing)
    for _ in range(times):
        placing.fate(*step).lost(what, position)
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


@pytest.mark.parametrize("reset", [False, True])
def test_steps_in_a_row_count(step: tuple[Trace, Program], *, reset: bool) -> None:
    nothing: Any = None
    placing = Placing(nothing, nothing)
    fate = placing.fate(*step)
    for number in range(MOST_LOST):
        fate.lost("no free range", None)
        if reset and number == 0:
            fate.kept()
    assert bool(placing.note) != reset
    assert placing.steps == reset


def test_memory_that_runs_out_while_some_is_held(step: tuple[Trace, Program]) -> None:
    nothing: Any = None
    placing = Placing(nothing, nothing)
    fate = placing.fate(*step)
    fate.failed(RuntimeError("shapes do not match"))
    assert not placing.take_starved()
    assert not placing.note
    fate.failed(torch.OutOfMemoryError("CUDA out of memory"))
    assert placing.take_starved()
    assert not placing.take_starved()
    assert placing.note == STARVED
