"""vdnn-conv: vDNN, offloading the inputs of convolutions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.vdnn.layers import convolution_gaps, placed
from outcore.policies.workspaces import Algorithms, settle_as


@dataclass(frozen=True, slots=True)
class VdnnConv:
    """Offload the inputs of convolutions, which run long enough to hide a copy; keep the rest."""

    name: ClassVar[str] = "vdnn-conv"
    summary: ClassVar[str] = "offload the inputs of convolutions, one ahead, in step with layers"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept, and make no layer."""
    algorithms: Algorithms = Algorithms.MEMORY
    """Which variants the ops run as, if they have any."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Offload the inputs of convolutions. Raises InfeasibleError if that does not fit."""
        choices = placed(problem, self.min_bytes, convolution_gaps)
        return settle_as(problem, choices, self, self.algorithms)
