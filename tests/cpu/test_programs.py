"""Programs without a plan of the policy: what they take of the outer tiers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, staging_needed, tier_bytes
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.trace import Effect
from outcore.policies import overflow, with_roomy_host
from outcore.runtime.planning.programs import Programs
from outcore.runtime.planning.solving import Solver
from tests.pure.test_overflow import MAP_BYTES, SWAP_ALL, chained, two_in_turn


def lean(problem: Problem, plan: Plan = KEEP_ALL, without: Collection[Tier] = ()) -> Program:
    """The program of little memory for a call under `plan`, with a disk beyond the host."""
    settings: Any = SimpleNamespace(disk_budget_bytes=1 << 20, spill_dir=None)
    driver: Any = None
    solver = Solver(settings, driver)
    solver._hardware = problem.hardware
    shares: Any = SimpleNamespace(problem=lambda *_: problem, outer=lambda *_: 1 << 20)
    planned: Any = SimpleNamespace(problem=problem, plan=plan)
    return Programs(solver).lean(shares, planned, 0, 0, without=without)


def test_what_runs_without_overlap_is_inside_the_host_budget() -> None:
    """With overlap, there would be room on the host; for the disk there are no staging buffers."""
    roomy = two_in_turn(2 * MAP_BYTES)
    assert fits(roomy, lean(roomy))
    with pytest.raises(InfeasibleError):
        lean(two_in_turn(MAP_BYTES))


def test_what_has_no_room_on_the_host_goes_to_the_disk() -> None:
    """The host's staging buffers are for copies, not for what is stored."""
    problem = chained(4096)
    ops = (replace(op, effects=frozenset([Effect.UNREPEATABLE])) for op in problem.trace.ops[:10])
    trace = replace(problem.trace, ops=(*ops, *problem.trace.ops[10:]))
    problem = replace(problem, trace=trace)
    roomy = replace(problem, budget_bytes=1 << 20, host_budget_bytes=8192)
    plan = overflow(roomy, SWAP_ALL(with_roomy_host(problem)))
    assert staging_needed(trace, plan) > 0
    program = lean(replace(problem, budget_bytes=8192), plan, (Tier.HOST,))
    assert tier_bytes(problem, program, Tier.HOST) == 0
    assert tier_bytes(problem, program, Tier.DISK) > 0
