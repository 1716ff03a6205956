"""evaluate: compute the time and memory of many plans of one problem, as `simulate` would."""

from __future__ import annotations

from outcore.evaluate.evaluator import Evaluation, Evaluator
from outcore.evaluate.kinds import KEEP, NO_HINT, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY

__all__ = [
    "KEEP",
    "NO_HINT",
    "OFFLOAD",
    "RECOMPUTE",
    "RECOMPUTE_STAY",
    "Evaluation",
    "Evaluator",
]
