"""cheap: recompute what takes less time to make than half its copy; the simplest hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.policies.pooch.log import OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.policy import PoochPolicy
from outcore.policies.pooch.search import keep_from_the_output
from outcore.policies.reruns import limited


@dataclass(frozen=True, slots=True)
class Cheap(PoochPolicy):
    """Keep what fits, from the output side; of the rest, recompute what is cheap to make again.

    A candidate is cheap if the op that makes it takes less than half the time of its copy out. If
    there is no room to recompute it, it is offloaded after all.
    """

    name: ClassVar[str] = "cheap"
    summary: ClassVar[str] = (
        "keep from the output side, recompute what costs less than half its copy"
    )

    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """Decide on each candidate once, without simulating a timeline."""
        kinds = keep_from_the_output(model)
        for number in _cheap(model, kinds):
            kinds[number] = RECOMPUTE
            if not model.fits(kinds):
                kinds[number] = OFFLOAD
        return kinds


def _cheap(model: PoochModel, kinds: Sequence[Kind]) -> list[int]:
    """The targets that `kinds` offloads and that are cheap to recompute, in order."""
    numbers = {}
    for number, (target, made_by) in enumerate(zip(model.targets, model.producers, strict=True)):
        if kinds[number] is not OFFLOAD or not target.recomputable or made_by is None:
            continue
        if model.log.forward[made_by].seconds < target.out_seconds / 2:
            numbers[target.gap] = number
    return [numbers[gap] for gap in limited(model.trace, numbers)]
