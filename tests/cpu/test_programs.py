"""Programs without a plan of the policy: what they take of the outer tiers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.memory import fits
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.runtime.planning.programs import Programs
from outcore.runtime.planning.solving import Solver
from tests.pure.test_overflow import MAP_BYTES, two_in_turn


def lean(problem: Problem) -> Program:
    """The program of little memory for a call, with a disk beyond the host."""
    settings: Any = SimpleNamespace(disk_budget_bytes=1 << 20, spill_dir=None)
    driver: Any = None
    solver = Solver(settings, driver)
    solver._hardware = problem.hardware
    shares: Any = SimpleNamespace(problem=lambda *_: problem, outer=lambda *_: 1 << 20)
    planned: Any = SimpleNamespace(problem=problem)
    return Programs(solver).lean(shares, planned, 0, 0)


def test_what_runs_without_overlap_is_inside_the_host_budget() -> None:
    """With overlap, there would be room on the host; for the disk there are no staging buffers."""
    roomy = two_in_turn(2 * MAP_BYTES)
    assert fits(roomy, lean(roomy))
    with pytest.raises(InfeasibleError):
        lean(two_in_turn(MAP_BYTES))
