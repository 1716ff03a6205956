"""swap-all: offload every candidate, with PoocH's schedule (its ablation "swap-all")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch_log import OFFLOAD
from outcore.policies.pooch_plan import pooch_plan, published


@dataclass(frozen=True, slots=True)
class SwapAll:
    """Offload every candidate; fetch as early as memory allows.

    Copies back are issued as in PoocH's code; with `early`, lowering issues each as early as memory
    allows.
    """

    name: ClassVar[str] = "swap-all"
    summary: ClassVar[str] = "offload everything that crosses the boundary, with scheduled fetches"

    min_bytes: int = MIN_BYTES
    early: bool = False

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Offload all. Raises InfeasibleError where the working set of some op does not fit."""
        schedule = None if self.early else published
        return pooch_plan(
            problem, self, self.min_bytes, lambda model: [OFFLOAD] * len(model.targets), schedule
        )
