"""Counts: how many tensors are kept, offloaded and recomputed between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.ir.liveness import crossing_gaps
from outcore.ir.plan import Offload, Plan, Recompute
from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Counts:
    """How often a plan makes each choice, over the gaps that cross from forward to backward.

    Dead gaps, in which a buffer is held only for recomputations, are counted by `count_held`.
    """

    keep: int = 0
    offload: int = 0
    recompute: int = 0


def count_held(plan: Plan) -> int:
    """The number of buffers that no op needs any more and that are held for recomputations."""
    return sum(gap.dead for gap, _ in plan.moves)


def count_choices(trace: Trace, plan: Plan) -> Counts:
    """The Counts of one plan."""
    choices = [plan.choice(gap) for gap in crossing_gaps(trace)]
    offload = sum(isinstance(choice, Offload) for choice in choices)
    recompute = sum(isinstance(choice, Recompute) for choice in choices)
    return Counts(len(choices) - offload - recompute, offload, recompute)
