"""swap-all-naive: offload every candidate, fetch one step ahead (PoocH's "w/o scheduling")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch.plan import one_ahead, pooch_plan
from outcore.policies.pooch.search import offload_all


@dataclass(frozen=True, slots=True)
class SwapAllNaive:
    """Offload every candidate; fetch each one break point before it is needed."""

    name: ClassVar[str] = "swap-all-naive"
    summary: ClassVar[str] = "offload everything that crosses the boundary, fetch one step ahead"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Offload all. Raises InfeasibleError if the working set of some op does not fit."""
        return pooch_plan(problem, self, self.min_bytes, offload_all, one_ahead)
