"""pooch: PoocH as published in its code (`Trainer.optimize_swap_targets`, 3.0.0rc1-pooch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.policies.pooch.log import Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.policy import PoochPolicy
from outcore.policies.pooch.search import keep_from_the_output, recompute_where_cheaper


@dataclass(frozen=True, slots=True)
class Pooch(PoochPolicy):
    """Step 1: keep what fits, from the output side. Step 2: recompute where offloading costs more.

    Ito et al., "Profiling based out-of-core hybrid method for large neural networks" (PoocH), arXiv
    1907.05013. This is the greedy algorithm of the published code, not the exponential search of
    the paper (section 4).
    """

    name: ClassVar[str] = "pooch"
    summary: ClassVar[str] = "keep what fits, then offload or recompute, by PoocH's published code"

    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """Both steps of PoocH."""
        return recompute_where_cheaper(model, keep_from_the_output(model))
