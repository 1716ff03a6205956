"""drift: planned steps that do not take the time that was predicted (docs/drift.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import TypeAlias

from outcore.ir.hardware import Hardware, Link, Tier

DRIFT = 0.25
"""The part of the prediction by which planned steps may be slower or faster."""

WARM_UP_STEPS = 2
"""Planned steps that do not count, besides those that are metered."""

WATCHED_STEPS = 16
"""The median of so many steps is held against the prediction: up to 7 in a row may be disturbed."""

Way: TypeAlias = tuple[Tier, Tier]
"""A direction of a link: from, to."""

Copies: TypeAlias = Sequence[tuple[int, float]]
"""Pairs (nbytes, seconds) of copies as measured."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The median time of some planned steps, beside the prediction. Seconds."""

    predicted_seconds: float
    measured_seconds: float
    steps: int

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        if self.predicted_seconds:
            return self.measured_seconds / self.predicted_seconds
        return inf if self.measured_seconds else 1.0

    def beyond(self, margin: float | None) -> bool:
        """Whether the two differ by more than the part `margin` of the prediction; None: never."""
        return margin is not None and abs(self.ratio - 1) > margin

    def __str__(self) -> str:
        """For notes: the ratio, and over how many steps."""
        times = "much more than" if isinf(self.ratio) else f"{self.ratio:.2f}x"
        return f"measured {times} the prediction over {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Replanned:
    """Why a graph was planned again, and whether that gave it another program."""

    drift: Drift
    changed: bool


@dataclass(slots=True)
class Watch:
    """Tells when planned steps are to be held against the prediction: now and then, once warm."""

    next_check: int = WARM_UP_STEPS + WATCHED_STEPS + 1
    """Steps noted by then. The last one is left out: a device may still be at it."""

    def due(self, steps: int) -> bool:
        """Whether it is time, `steps` having been noted; then not again for `WATCHED_STEPS`."""
        if steps < self.next_check:
            return False
        self.next_check = steps + WATCHED_STEPS
        return True


def as_measured(hardware: Hardware, copies: Mapping[Way, Copies]) -> Hardware:
    """`hardware` with each link as fast as the copies that went over it; the others stay."""
    links = tuple((a, b, _fitted(link, copies.get((a, b), ()))) for a, b, link in hardware.links)
    return replace(hardware, links=links)


def _fitted(link: Link, copies: Copies) -> Link:
    """`link`, scaled so that all of `copies` take in sum what they took; sizes tell no latency."""
    measured = sum(seconds for _, seconds in copies)
    predicted = sum(link.seconds(nbytes) for nbytes, _ in copies)
    if measured <= 0 or predicted <= 0:
        return link
    scale = measured / predicted
    return Link(link.bytes_per_second / scale, link.latency_seconds * scale)
