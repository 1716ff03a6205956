"""vdnn-all: vDNN, offloading what every layer retains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.vdnn.layers import all_gaps, placed
from outcore.policies.workspaces import Algorithms, settle_as


@dataclass(frozen=True, slots=True)
class VdnnAll:
    """Offload what every layer retains, each copy within the time of one layer."""

    name: ClassVar[str] = "vdnn-all"
    summary: ClassVar[str] = (
        "offload what every layer retains, one layer ahead, in step with layers"
    )

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept, and make no layer."""
    algorithms: Algorithms = Algorithms.MEMORY
    """Which variants the ops run as, if they have any."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Offload all but the last layer's. Raises InfeasibleError if that does not fit."""
        choices = placed(problem, self.min_bytes, all_gaps)
        return settle_as(problem, choices, self, self.algorithms)
