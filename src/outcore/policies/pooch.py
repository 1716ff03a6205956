"""pooch: PoocH as published in its code (`Trainer.optimize_swap_targets`, 3.0.0rc1-pooch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch_log import Kind
from outcore.policies.pooch_model import PoochModel
from outcore.policies.pooch_plan import pooch_plan, published
from outcore.policies.pooch_search import keep_from_the_output, recompute_where_cheaper


@dataclass(frozen=True, slots=True)
class Pooch:
    """Step 1: keep what fits, from the output side. Step 2: recompute where offloading costs more.

    Ito et al., "Profiling based out-of-core hybrid method for large neural networks" (PoocH),
    arXiv 1907.05013; this is the greedy of the published code, not the exponential search of the
    paper. Copies back are issued as there; with `early`, lowering issues each as early as memory
    allows, and the decisions assume that.
    """

    name: ClassVar[str] = "pooch"
    summary: ClassVar[str] = "keep what fits, then offload or recompute, by PoocH's published code"

    min_bytes: int = MIN_BYTES
    early: bool = False

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """Keep, offload, recompute. Raises InfeasibleError where offloading all does not fit."""
        schedule = None if self.early else published
        return pooch_plan(problem, self, self.min_bytes, _decide, schedule)


def _decide(model: PoochModel) -> Sequence[Kind]:
    return recompute_where_cheaper(model, keep_from_the_output(model))
