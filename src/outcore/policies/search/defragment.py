"""defragment: change a plan a little, so that a GPU's allocator finds a place for each tensor.

The simulated step does not show where tensors lie. Of plans that take equally long, some fragment
free memory all through the step, and others do not. If a buffer comes back one op earlier, or
leaves one op later, it lies elsewhere, and so does everything after it (decision 0036).
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from outcore.allocators import Card
from outcore.errors import InfeasibleError, VerifyError
from outcore.evaluate import Evaluator
from outcore.ir.plan import Choice, Gap, Offload, Plan, default_choice, make_plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.policies.search.judge import judge
from outcore.simulate import simulate

MOST_TRIES, SHORT = 64, 500
"""The number of changes that are tried in a step of at most `SHORT` ops; in longer steps,
proportionally fewer."""

IDLE = 32
"""The search stops after this many changes in a row without a gain."""

OTHERWISE = 0.3
"""The share of the changes that set a gap back to its default."""


@dataclass(frozen=True, slots=True)
class _Served:
    """A plan, the seconds of its step, and the seconds that the step loses to the allocator."""

    plan: Plan
    seconds: float
    lost: float

    @property
    def total(self) -> float:
        """Seconds of the step and of its losses together: what hill climbing minimizes."""
        return self.seconds + self.lost


@dataclass(frozen=True, slots=True)
class Defragment:
    """Hill climbing from `known`, by the seconds of its step and what it loses to the allocator.

    What it loses is predicted by the model of the allocator of `card`. Gaps in `fixed` stay as they
    are. `seed` is for the random changes.
    """

    name: ClassVar[str] = "defragment"
    summary: ClassVar[str] = "a plan, changed a little so that its tensors find their place"

    known: Plan
    card: Card
    fixed: frozenset[Gap] = frozenset()
    seed: int = 0

    def plan(self, problem: Problem) -> Plan:
        """The best plan found; `known` itself if nothing is gained.

        Lowers and serves at most `MOST_TRIES` more plans. If the current plan loses nothing but its
        step takes longer than that of `known`, climbing starts again from `known`.
        """
        evaluator, draws = Evaluator(problem), random.Random(self.seed)
        start = best = now = self._served(
            problem, self.known, simulate(problem, lower(problem, self.known, fast=True)).seconds
        )
        gained = 0
        for number in range(MOST_TRIES * SHORT // max(SHORT, len(problem.trace.ops))):
            if number - gained >= IDLE:
                break
            if not now.lost:
                if now.seconds <= start.seconds:
                    break
                now = start
            if all(gap in self.fixed for gap, _ in now.plan.moves):
                break
            found = self._changed(now.plan, draws)
            with suppress(InfeasibleError, VerifyError):
                judged = judge(evaluator, found)
                most = min(now.total, best.total) - judged.seconds
                if judged.fits and most > 0:
                    served = self._served(problem, found, judged.seconds, most)
                    now = now if served.total > now.total else served
                    if now.total < best.total:
                        gained = number
                    best = best if now.total > best.total else now
        return best.plan

    def _served(self, problem: Problem, plan: Plan, seconds: float, most: float = inf) -> _Served:
        """Serve the lowered `plan` with the model of the allocator.

        Stops early, with `lost` above `most`, as soon as the plan loses more than `most` seconds.
        """
        lost = self.card.lost_seconds(problem, lower(problem, plan, fast=True), most)
        return _Served(plan, seconds, lost)

    def _changed(self, plan: Plan, draws: random.Random) -> Plan:
        """`plan` with one random change: an offload at other times, or a gap at its default."""
        moves = {gap: choice for gap, choice in plan.moves if gap not in self.fixed}
        offloads = [(gap, c) for gap, c in moves.items() if isinstance(c, Offload)]
        if offloads and draws.random() >= OTHERWISE:
            gap, offload = draws.choice(offloads)
            change: Choice = _at_another_time(gap, offload, draws)
        else:
            gap = draws.choice([*moves])
            change = default_choice(gap)
        return replace(plan, choices=make_plan(plan.by_gap | {gap: change}).choices)


def _at_another_time(gap: Gap, offload: Offload, draws: random.Random) -> Offload:
    """`offload` with its memory freed, or allocated again, before another op of the gap."""
    first = gap.after + 1 if offload.depart is None else max(gap.after + 1, offload.depart)
    last = gap.before if offload.arrive is None else offload.arrive
    if draws.getrandbits(1):
        latest = last if offload.prefetch is None else offload.prefetch
        return replace(offload, release=draws.randint(min(first, latest), latest))
    earliest = first if offload.release is None else offload.release
    return replace(offload, prefetch=draws.randint(min(earliest, last), last))
