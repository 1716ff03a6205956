"""search: outcore's own planner, a local search over the choice for every gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from outcore.errors import InfeasibleError, PolicyError
from outcore.evaluate import Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.search_anneal import Annealing
from outcore.policies.search_space import make_space
from outcore.policies.search_starts import find_starts
from outcore.policies.settle import settle
from outcore.simulate import simulate
from outcore.spec import spec_text

SLOWER = 50
"""By how much the effort is less where evaluations are not compiled."""


@dataclass(frozen=True, slots=True)
class Search:
    """Improve the best plan of the other policies, one or a few choices at a time, by annealing.

    Every candidate is judged by what it would take in truth: the simulated time and the peak of its
    lowered program. `effort`: how many ops are simulated in all, in millions; the same effort and
    `seed` give the same plan.
    """

    name: ClassVar[str] = "search"
    summary: ClassVar[str] = "local search over every gap, judged by the simulated step"

    min_bytes: int = MIN_BYTES
    effort: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        if not 0 <= self.effort < float("inf"):
            reason = f"effort={self.effort:g}: millions of ops to simulate, 0 for none"
            raise PolicyError(policy=self.name, reason=reason)

    def plan(self, problem: Problem) -> Plan:
        """The fastest plan found.

        Raises InfeasibleError where no policy that it starts from has a plan that fits.
        """
        found = find_starts(problem, self.min_bytes)
        if not found.plans:
            raise least(found.refusals)
        started = [replace(plan, policy=spec_text(self)) for plan in found.plans]
        if not started[0].choices:  # everything is kept: nothing is faster
            return started[0]
        return min(
            [*self._improved(problem, started), *started],
            key=lambda plan: simulate(problem, lower(problem, plan, fast=True)).seconds,
        )

    def _improved(self, problem: Problem, started: Sequence[Plan]) -> list[Plan]:
        """What annealing makes of the plans; none where none fits without its hints."""
        evaluator = Evaluator(problem)
        space = make_space(problem, evaluator.gaps, self.min_bytes)
        annealing = Annealing(space, evaluator, self.seed)
        for plan in started:
            annealing.start(space.kinds(plan))
        effort = self.effort if evaluator.compiled else self.effort / SLOWER
        kinds = annealing.run(int(effort * 1e6 / max(1, len(problem.trace.ops))))
        found = [evaluator.plan(kinds)] if annealing.found else []
        return [settle(problem, plan.by_gap, self) for plan in found]


def least(refusals: Sequence[InfeasibleError]) -> InfeasibleError:
    """The refusal that asks for least of the device, where any asks for that; else the first."""
    device = [error for error in refusals if error.tier == Tier.DEVICE.value]
    return min(device, key=lambda error: error.floor_bytes) if device else refusals[0]
