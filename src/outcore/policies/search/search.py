"""search: outcore's own planner, a local search over the choice for every gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import itemgetter
from typing import ClassVar

from outcore.errors import InfeasibleError, PolicyError, VerifyError
from outcore.evaluate import Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.search.anneal import Annealing, Effort
from outcore.policies.search.brief import begin
from outcore.policies.search.judge import judge
from outcore.policies.search.just_in_time import just_in_time
from outcore.policies.search.lazy_release import lazy_release
from outcore.policies.search.space import make_space
from outcore.policies.search.starts import find_starts
from outcore.policies.settle import settle
from outcore.spec import spec_text

SHALLOW, DEEP = 500, 1000
"""A step with fewer ops than the first, or more than the second, counts as having that many, so
that the number of steps of a walk stays in bounds."""

MOST_EFFORT = 7
"""A walk simulates at most this many times its effort if every op of a step is counted."""

HASTE = 20
"""Effort and seconds are divided by this in haste."""

SLOWER = 50
"""The effort is divided by this if evaluations are not compiled."""


@dataclass(frozen=True, slots=True)
class Search:
    """Improve the best plan of the other policies, one or a few choices at a time, by annealing.

    Every candidate is judged by the simulated time and the peak of its lowered program. In the end,
    copies back that are done too early are delayed (`just_in_time`), and buffers that leave hold
    their memory longer (`lazy_release`).

    - `effort`: how many ops each of the `walks` simulates, in millions. A step counts as 500 to
      1000 of them, and in all they are no more than seven times as many.
    - `seed`: the same effort, walks and seed give the same plan.
    - `seconds`: the most that planning may take, as far as the first plan that fits allows; 0 for
      no limit. What is found then depends on how fast the machine is.
    """

    name: ClassVar[str] = "search"
    summary: ClassVar[str] = "local search over every gap, judged by the simulated step"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept, and dropped after their last use; if nothing fits this way, the
    search decides on all."""
    effort: float = 20.0
    """Millions of ops that each walk simulates; 0: only the starts are compared."""
    walks: int = 2
    """How many walks run in parallel."""
    seconds: float = 0.0
    """The most time for planning; 0: no limit."""
    seed: int = 0
    """Seed of the random changes."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        if not 0 <= self.effort < float("inf"):
            reason = f"effort={self.effort:g}: millions of ops to simulate, 0 for none"
            raise PolicyError(policy=self.name, reason=reason)
        if self.walks < 1:
            reason = f"walks={self.walks}: it must be at least 1"
            raise PolicyError(policy=self.name, reason=reason)
        if self.seed < 0:
            reason = f"seed={self.seed}: it must be at least 0"
            raise PolicyError(policy=self.name, reason=reason)
        if not 0 <= self.seconds < float("inf"):
            reason = f"seconds={self.seconds:g}: the most that planning may take, 0 for any"
            raise PolicyError(policy=self.name, reason=reason)

    @property
    def in_haste(self) -> Search:
        """The same search with little effort."""
        return replace(self, effort=self.effort / HASTE, seconds=self.seconds / HASTE)

    def plan(self, problem: Problem) -> Plan:
        """The fastest plan found.

        Raises InfeasibleError if no policy that it starts from has a plan that fits.
        """
        return self.improve(problem, ())

    def improve(self, problem: Problem, known: Sequence[Plan]) -> Plan:
        """The fastest plan found, starting also from plans `known` for other budgets.

        Known plans must be of the same trace. None that fits is faster than the result. Raises
        InfeasibleError if neither a known plan nor one of the policies that it starts from fits.
        """
        deadline = time.perf_counter() + self.seconds if self.seconds else inf
        evaluator = Evaluator(problem)
        kept = evaluator.evaluate(evaluator.default_kinds)
        if kept.fits and not problem.profile.alternatives:
            return settle(problem, {}, self)  # no plan is faster
        starts = find_starts(problem, self.min_bytes, deadline)
        plans = (*starts.plans, *self._that_fit(problem, known))
        if not plans:
            raise replace(least(starts.refusals), policy=spec_text(self))
        return self.fastest(evaluator, plans, partial(self._begin, evaluator, plans), deadline)

    def fastest(
        self,
        evaluator: Evaluator,
        plans: Sequence[Plan],
        start: Callable[[int], Annealing],
        deadline: float,
    ) -> Plan:
        """The fastest of `plans` and of what annealing finds; copies are as late as they may be.

        `start`: starts the annealing from them, given the least bytes of what it decides on.
        """
        annealing = start(self.min_bytes)
        if not annealing.found:  # nothing fits while small buffers are kept
            annealing = start(1)
        ops = len(evaluator.problem.trace.ops)
        kinds = annealing.run(self.effort_for(ops, deadline, compiled=evaluator.compiled))
        judged = ((judge(evaluator, plan).seconds, plan) for plan in plans)
        seconds, best = min(judged, key=itemgetter(0))
        if annealing.best.seconds <= seconds:
            best = evaluator.plan(kinds)
        in_time = just_in_time(evaluator, replace(best, policy=spec_text(self)))
        return lazy_release(evaluator, in_time)

    def _begin(self, evaluator: Evaluator, plans: Sequence[Plan], min_bytes: int) -> Annealing:
        """Start from the best of `plans`, or with everything kept."""
        space = make_space(evaluator.problem, evaluator, min_bytes)
        starts = (evaluator.default_kinds, *map(space.kinds, plans))
        return begin(evaluator, space, starts, self.seed)

    def _that_fit(self, problem: Problem, known: Sequence[Plan]) -> Iterator[Plan]:
        """The `known` plans, made for another problem, that are possible and fit in this one."""
        for plan in known:
            with suppress(InfeasibleError, VerifyError):
                yield settle(problem, plan.by_gap, self, plan.by_op)

    def effort_for(self, ops: int, deadline: float, *, compiled: bool) -> Effort:
        """How much to search for a step of this many ops.

        Without numba evaluations are slow and Python runs one thread at a time, so there is one
        walk.
        """
        effort, walks = (self.effort, self.walks) if compiled else (self.effort / SLOWER, 1)
        return Effort(evaluations(effort, ops), walks, deadline)


def evaluations(effort: float, ops: int) -> int:
    """How many plans of this many ops a walk may evaluate."""
    steps = min(effort / min(max(SHALLOW, ops), DEEP), MOST_EFFORT * effort / max(1, ops))
    return int(steps * 1e6)


def least(refusals: Sequence[InfeasibleError]) -> InfeasibleError:
    """The refusal that needs the least device memory; the first if none is about the device."""
    device = [error for error in refusals if error.tier == Tier.DEVICE.value]
    return min(device, key=lambda error: error.floor_bytes) if device else refusals[0]
