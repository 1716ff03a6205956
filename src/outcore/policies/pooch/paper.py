"""pooch-paper: PoocH as the text of its paper describes it (section 4), with a bounded tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import PolicyError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch.log import Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.plan import pooch_plan
from outcore.policies.pooch.timeline import recompute_where_faster
from outcore.policies.pooch.tree import keep_by_tree

LEAVES = 1024
"""Default of `leaves`: ten levels of the tree, or a beam; some seconds of planning for
ResNet-50."""


@dataclass(frozen=True, slots=True)
class PoochPaper:
    """Step 1: the fastest way to keep or offload. Step 2: recompute where that is faster still.

    Ito et al., PoocH, arXiv 1907.05013, section 4. Candidates are buffers of at least `min_bytes`.
    Copies back are issued as early as memory allows (section 4.3). Step 1 simulates at most
    `leaves` leaves of its tree.
    """

    name: ClassVar[str] = "pooch-paper"
    summary: ClassVar[str] = (
        "search keep or offload by simulated time, then recompute, by PoocH's paper"
    )

    min_bytes: int = MIN_BYTES
    leaves: int = LEAVES

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        if self.leaves < 1:
            reason = f"leaves={self.leaves}: it is at least 1, the leaf of the greedy scan"
            raise PolicyError(policy=self.name, reason=reason)

    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """Both steps: one kind per target of `model`."""
        return recompute_where_faster(model, keep_by_tree(model, self.leaves))

    def plan(self, problem: Problem) -> Plan:
        """The plan of `decide`. Raises InfeasibleError if not even offloading everything fits."""
        return pooch_plan(problem, self, self.min_bytes, self.decide, schedule=None)
