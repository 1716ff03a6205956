"""drift: compare the time of planned steps with the prediction (docs/drift.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import TypeAlias

from outcore.ir.hardware import Hardware, Link, Tier

DRIFT = 0.25
"""The fraction of the prediction by which planned steps may be slower or faster, by default."""

WARM_UP_STEPS = 2
"""Planned steps that do not count. Metered steps do not count either."""

WATCHED_STEPS = 16
"""The median of so many steps is compared with the prediction: up to 7 of them may be disturbed."""

Way: TypeAlias = tuple[Tier, Tier]
"""A direction of a link: from, to."""

Copies: TypeAlias = Sequence[tuple[int, float]]
"""Pairs (nbytes, seconds) of measured copies."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The predicted time of a planned step, and the median of what some steps took."""

    predicted_seconds: float
    measured_seconds: float
    steps: int
    """How many steps were measured."""

    @property
    def ratio(self) -> float:
        """Measured over predicted time; infinite if only the predicted time is 0."""
        if self.predicted_seconds:
            return self.measured_seconds / self.predicted_seconds
        return inf if self.measured_seconds else 1.0

    def beyond(self, margin: float | None) -> bool:
        """Whether they differ by more than the fraction `margin` of the prediction; None: never."""
        return margin is not None and abs(self.ratio - 1) > margin

    def __str__(self) -> str:
        """The ratio and the number of steps, as text for notes."""
        times = "much more than" if isinf(self.ratio) else f"{self.ratio:.2f}x"
        return f"measured {times} the prediction over {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Replanned:
    """Why a graph was planned again, and whether that gave it another program."""

    drift: Drift
    changed: bool


@dataclass(slots=True)
class DriftWatch:
    """Decides when to compare planned steps with the prediction: after warm-up, at intervals."""

    next_check: int = WARM_UP_STEPS + WATCHED_STEPS + 1
    """The number of noted steps at the next check. The last step is left out of it: the device may
    not have finished that yet."""

    def due(self, steps: int) -> bool:
        """Whether to check, with `steps` noted so far; then not again for `WATCHED_STEPS` steps."""
        if steps < self.next_check:
            return False
        self.next_check = steps + WATCHED_STEPS
        return True


def as_measured(hardware: Hardware, copies: Mapping[Way, Copies]) -> Hardware:
    """`hardware` with each link scaled to the measured copies over it; links without any stay."""
    links = tuple((a, b, _fitted(link, copies.get((a, b), ()))) for a, b, link in hardware.links)
    return replace(hardware, links=links)


def _fitted(link: Link, copies: Copies) -> Link:
    """`link`, scaled so that its prediction for all `copies` equals their total measured time.

    Bandwidth and latency are scaled by the same factor: copies do not show the two separately.
    """
    measured = sum(seconds for _, seconds in copies)
    predicted = sum(link.seconds(nbytes) for nbytes, _ in copies)
    if measured <= 0 or predicted <= 0:
        return link
    scale = measured / predicted
    return Link(link.bytes_per_second / scale, link.latency_seconds * scale)
