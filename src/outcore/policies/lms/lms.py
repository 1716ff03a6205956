"""lms: Large Model Support: offload what is read again many levels later, tuned by replays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from outcore.errors import PolicyError
from outcore.ir.hardware import Tier
from outcore.ir.plan import KEEP_ALL, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.policies.candidates import away
from outcore.policies.floor import plan_floor
from outcore.policies.lms.replay import Replay
from outcore.policies.lms.swaps import Edges, Setting, choices, edges
from outcore.policies.lms.tune import TUNED, tighten, tune
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle


@dataclass(frozen=True, slots=True)
class Lms:
    """Offload what is read more than `threshold` levels after it is made; levels are longest paths.

    Readers that are at most `groupby` levels apart share one copy back. It is issued `ahead` levels
    before the first of them. -1 in any of these three: replays of the step's memory, level by
    level, tune it. `sync` 1 or 3 waits for each copy out, 2 or 3 for each copy back; tuning the
    threshold may raise it.
    """

    name: ClassVar[str] = "lms"
    summary: ClassVar[str] = "offload what is read again many levels later, tuned to the budget"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""
    threshold: int = TUNED
    ahead: int = TUNED
    groupby: int = TUNED
    sync: int = 0
    """Which copies compute waits for; 0: none."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        for option in ("threshold", "ahead", "groupby"):
            value: int = getattr(self, option)
            if value < TUNED:
                reason = f"{option}={value}: it is a number of levels, or {TUNED} to have it tuned"
                raise PolicyError(policy=self.name, reason=reason)
        if self.sync not in range(4):
            reason = f"sync={self.sync}: it is 0, 1 (out), 2 (back) or 3 (both)"
            raise PolicyError(policy=self.name, reason=reason)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the setting. Raises InfeasibleError if it does not fit.

        If the threshold is tuned, raises it only if neither the setting nor keeping everything can
        be made to fit.
        """
        leave, found = away(problem), edges(problem.trace, self.min_bytes)
        if not found.idle or not isinstance(leave, Offload):
            return settle(problem, {}, self)
        enough = problem.budget_bytes
        tuned = self.threshold == TUNED
        kept = plan_floor(problem, KEEP_ALL).nbytes
        if tuned and kept <= enough:
            return settle(problem, {}, self)
        floor = cache(partial(_floor, problem, found, leave.tier))
        given = Setting(self.threshold, self.ahead, self.groupby, self.sync)
        setting = tune(Replay(problem, found).passes, given, found.levels.count)
        setting = tighten(lambda trial: floor(trial) <= enough, setting, given)
        if tuned and floor(setting) > enough and floor(setting) > kept:
            return settle(problem, {}, self)  # its error names the smaller budget
        return settle(problem, choices(found, setting, leave.tier), self)


def _floor(problem: Problem, found: Edges, tier: Tier, setting: Setting) -> int:
    """The smallest budget that the plan of `setting` meets."""
    return plan_floor(problem, make_plan(choices(found, setting, tier))).nbytes
