"""swap-opt: keep what fits, from the output side; offload the rest (step 1 of PoocH)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.policies.pooch.log import Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.policy import PoochPolicy
from outcore.policies.pooch.search import keep_from_the_output


@dataclass(frozen=True, slots=True)
class SwapOpt(PoochPolicy):
    """Keep candidates while they fit, the last copied out first; offload the others."""

    name: ClassVar[str] = "swap-opt"
    summary: ClassVar[str] = "keep what fits, from the output side, and offload the rest"

    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """Step 1 of PoocH, without step 2."""
        return keep_from_the_output(model)
