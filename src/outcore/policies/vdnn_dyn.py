"""vdnn-dyn: vDNN, offloading no more than the budget asks for: nothing, convolutions, or all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Choice, Gap, Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle
from outcore.policies.vdnn_layers import all_gaps, convolution_gaps, placed


@dataclass(frozen=True, slots=True)
class VdnnDyn:
    """The first that fits of: keep all, offload as `vdnn-conv`, offload as `vdnn-all`."""

    name: ClassVar[str] = "vdnn-dyn"
    summary: ClassVar[str] = "the first that fits: keep all, vdnn-conv, vdnn-all"

    min_bytes: int = MIN_BYTES

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the first pass that fits.

        Raises InfeasibleError, with the least that one of them needs, where none does.
        """
        refused = []
        for choices in passes(problem, self.min_bytes):
            try:
                return settle(problem, choices, self)
            except InfeasibleError as error:
                refused.append(error)
        # The first pass offloads nothing, so that it is never an outer tier that it lacks.
        short = (error for error in refused if error.tier == Tier.DEVICE.value)
        raise min(short, key=lambda error: error.floor_bytes)


def passes(problem: Problem, min_bytes: int) -> Iterator[dict[Gap, Choice]]:
    """What to try, in order of preference (vDNN, section III-C).

    A profile has one cost per op: of vDNN's passes only those that differ in placement do here.
    With several algorithms per convolution, each would name one of them beside its placement.
    """
    yield {}
    yield placed(problem, min_bytes, convolution_gaps)
    yield placed(problem, min_bytes, all_gaps)
