"""swap-opt: keep what fits, from the output side; offload the rest (step 1 of PoocH)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch_plan import pooch_plan, published
from outcore.policies.pooch_search import keep_from_the_output


@dataclass(frozen=True, slots=True)
class SwapOpt:
    """Step 1 of PoocH: keep candidates while they fit, the last copied out first; offload others.

    Copies back are issued as in PoocH's code; with `early`, lowering issues each as early as memory
    allows.
    """

    name: ClassVar[str] = "swap-opt"
    summary: ClassVar[str] = "keep what fits, from the output side, and offload the rest"

    min_bytes: int = MIN_BYTES
    early: bool = False

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Keep and offload. Raises InfeasibleError where not even offloading everything fits."""
        schedule = None if self.early else published
        return pooch_plan(problem, self, self.min_bytes, keep_from_the_output, schedule)
