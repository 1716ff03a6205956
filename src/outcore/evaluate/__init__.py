"""evaluate: seconds and bytes of many plans of one problem, as `lower` and `simulate` have them."""

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
