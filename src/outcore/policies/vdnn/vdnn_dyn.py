"""vdnn-dyn: vDNN, offloading no more than the budget requires: nothing, convolutions, or all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.plan import Choice, Gap, Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, Policy, check_min_bytes
from outcore.policies.vdnn.layers import all_gaps, convolution_gaps, placed
from outcore.policies.workspaces import Algorithms, settle_as, settle_in_room


@dataclass(frozen=True, slots=True)
class VdnnDyn:
    """The first that fits of: keep all, offload as `vdnn-conv`, offload as `vdnn-all`.

    If ops have variants, each is tried first with the fastest ones; then `vdnn-conv` and `vdnn-all`
    are tried with the fastest ones that there is room for.
    """

    name: ClassVar[str] = "vdnn-dyn"
    summary: ClassVar[str] = "the first that fits: keep all, vdnn-conv, vdnn-all"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept, and make no layer."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the first pass that fits.

        Raises InfeasibleError if everything offloaded with the least workspaces does not fit, even
        if another pass would (vDNN, section III-C).
        """
        everything = placed(problem, self.min_bytes, all_gaps)
        settle_as(problem, everything, self, Algorithms.MEMORY)
        convolutions = placed(problem, self.min_bytes, convolution_gaps)
        for choices, settle in (
            ({}, _fastest),
            (convolutions, _fastest),
            (everything, _fastest),
            (convolutions, settle_in_room),
        ):
            try:
                return settle(problem, choices, self)
            except InfeasibleError:
                continue
        return settle_in_room(problem, everything, self)


def _fastest(problem: Problem, choices: Mapping[Gap, Choice], policy: Policy) -> Plan:
    """The plan of `choices` with the fastest variant of each op."""
    return settle_as(problem, choices, policy, Algorithms.PERFORMANCE)
