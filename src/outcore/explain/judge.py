"""Judge: predict time and memory of a plan with one gap changed and all else unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outcore.errors import VerifyError
from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.memory import staging_needed
from outcore.ir.plan import Choice, Gap, Keep, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.timeline import Timeline
from outcore.ir.verify_plan import verify_plan
from outcore.lower import lower
from outcore.simulate import simulate


@dataclass(frozen=True, slots=True)
class Verdict:
    """Time of a step and bytes by tier, or why there is no such plan."""

    seconds: float = math.inf
    nbytes: tuple[tuple[Tier, int], ...] = ()
    impossible: str = ""


class Judge:
    """Judges the plans that differ from `plan` in the choice for one gap.

    Its figures are those of `simulate(problem, lower(problem, changed))`, and of `needed_bytes`.
    `timeline` has to be the one of `plan` itself.
    """

    def __init__(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        self.own = Verdict(timeline.seconds, needed_bytes(problem, plan, timeline))
        self.problem = _as_chosen(problem, plan)
        self.plan = replace(plan, variants=())

    def judge(self, gap: Gap, choice: Choice) -> Verdict:
        """The verdict on the plan with `choice` for `gap`."""
        if choice == self.plan.choice(gap):
            return self.own
        if self._evaluator is None:
            return self._simulated(gap, choice)
        return self._evaluated(self._evaluator, gap, choice)

    @cached_property
    def _evaluator(self) -> Evaluator | None:
        """An evaluator for the plan's arrays; None if arrays cannot express the plan."""
        evaluator = Evaluator(self.problem)
        try:
            self._arrays = evaluator.arrays(self.plan)
        except ValueError:
            return None
        self._index = {gap: index for index, gap in enumerate(evaluator.gaps)}
        return evaluator

    def _evaluated(self, evaluator: Evaluator, gap: Gap, choice: Choice) -> Verdict:
        kinds, release, prefetch = self._arrays
        changed = kinds.copy()
        changed[self._index[gap]] = _kind(choice)
        found = evaluator.evaluate(changed, release=release, prefetch=prefetch)
        if math.isinf(found.seconds):
            return self._simulated(gap, choice)  # it says why not
        outer = self.problem.hardware.outer
        nbytes = ((Tier.DEVICE, found.peak_bytes), (outer, found.outer_bytes))
        return Verdict(found.seconds, nbytes)

    def _simulated(self, gap: Gap, choice: Choice) -> Verdict:
        changed = make_plan({**self.plan.by_gap, gap: choice})
        try:
            program = lower(self.problem, changed, fast=True)
        except VerifyError as error:
            if error.noun != "plan":
                raise
            return Verdict(impossible=self._refusal(changed, error))
        timeline = simulate(self.problem, program)
        return Verdict(timeline.seconds, needed_bytes(self.problem, changed, timeline))

    def _refusal(self, changed: Plan, error: VerifyError) -> str:
        """Why `changed` cannot be lowered: its own fault, or another choice depends on it."""
        try:
            verify_plan(self.problem, changed)
        except VerifyError as own:
            return own.detail
        return f"{error.where}: {error.detail}"


def needed_bytes(problem: Problem, plan: Plan, timeline: Timeline) -> tuple[tuple[Tier, int], ...]:
    """What `plan`, whose timeline is given, needs of each tier.

    What it sends to a disk passes through host memory, if the machine has both.
    """
    if not problem.hardware.capacity(Tier.HOST):
        return timeline.peak_bytes
    staging = staging_needed(problem.trace, plan)
    return tuple((t, n + (staging if t is Tier.HOST else 0)) for t, n in timeline.peak_bytes)


def overrun(problem: Problem, nbytes: Mapping[Tier, int]) -> tuple[Tier | None, int]:
    """The first tier whose budget `nbytes` exceeds, and by how much; (None, 0) if there is none."""
    for tier in Tier:
        over = nbytes.get(tier, 0) - problem.limit_bytes(tier)
        if over > 0:
            return tier, over
    return None, 0


def _as_chosen(problem: Problem, plan: Plan) -> Problem:
    """The problem with the variants that `plan` chooses for its ops as their defaults."""
    profile = problem.profile
    costs = [profile.cost(op, plan.variant(op)) for op in range(len(problem.trace.ops))]
    chosen = replace(
        profile,
        seconds=tuple(cost.seconds for cost in costs),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        alternatives=(),
    )
    return replace(problem, profile=chosen)


def _kind(choice: Choice) -> int:
    if isinstance(choice, Keep):
        return KEEP
    if isinstance(choice, Offload):
        return OFFLOAD
    return RECOMPUTE_STAY if choice.stay else RECOMPUTE
