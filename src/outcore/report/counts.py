"""Counts: how many tensors are kept, offloaded and recomputed between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.ir.liveness import crossing_gaps
from outcore.ir.plan import Offload, Plan, Recompute
from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Counts:
    """Gaps of the plan that cross from the forward to the backward call, by choice.

    What is held for recomputations alone (`count_held`) is not among them.
    """

    keep: int = 0
    offload: int = 0
    recompute: int = 0


def count_held(plan: Plan) -> int:
    """How many buffers that no op needs any more the plan holds for recomputations."""
    return sum(gap.dead for gap, _ in plan.moves)


def count_choices(trace: Trace, plan: Plan) -> Counts:
    """The Counts of one plan."""
    choices = [plan.choice(gap) for gap in crossing_gaps(trace)]
    offload = sum(isinstance(choice, Offload) for choice in choices)
    recompute = sum(isinstance(choice, Recompute) for choice in choices)
    return Counts(len(choices) - offload - recompute, offload, recompute)
