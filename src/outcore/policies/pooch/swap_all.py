"""swap-all: offload every candidate, with PoocH's schedule (its ablation "swap-all")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.policies.pooch.log import Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.policy import PoochPolicy
from outcore.policies.pooch.search import offload_all


@dataclass(frozen=True, slots=True)
class SwapAll(PoochPolicy):
    """Offload every candidate; fetch as early as memory allows.

    Without `early`, fetches come in the batches of PoocH's code, delayed as far as time allows.
    """

    name: ClassVar[str] = "swap-all"
    summary: ClassVar[str] = "offload everything that crosses the boundary, with scheduled fetches"

    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """Offload everything."""
        return offload_all(model)
