"""link_uses: what the copies of a step take, planned beside measured: contention is the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outcore.ir.hardware import Tier
from outcore.report.planned import PlannedStep
from outcore.report.tracks import Slice, Track, slices
from outcore.units import format_rate

Tracks: TypeAlias = dict[Track, list[Slice]]


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One direction of a link in one step. Bytes, seconds, and bytes per second of a copy at work.

    `rate` is what the plan counts on: that of copies beside computing, where the device could be
    asked for it. `measured_rate` is that of the same copies in a recorded step
    (`Backend.record_step`); None where not all of them were recorded.
    """

    name: str
    copies: int
    nbytes: int
    busy_seconds: float
    rate: float
    measured_rate: float | None = None

    def __str__(self) -> str:
        """For people: both rates, and how far the second is from the first."""
        planned = f"{format_rate(self.rate)} planned"
        if self.measured_rate is None:
            return planned
        ratio = self.measured_rate / self.rate
        return f"{planned}, {format_rate(self.measured_rate)} measured ({ratio:.0%})"


def link_uses(steps: Sequence[PlannedStep]) -> tuple[LinkUse, ...]:
    """Each direction that copies go over, summed up over the graphs of a step."""
    planned, heard = _by_track(steps, measured=False), _by_track(steps, measured=True)
    return tuple(_uses(planned, heard))


def _uses(planned: Tracks, heard: Tracks) -> Iterator[LinkUse]:
    for track, copies in planned.items():
        nbytes, seconds = _total(copies)
        if seconds > 0:
            moved, taken = _total(heard.get(track, ()))
            rate = moved / taken if moved == nbytes and taken > 0 else None  # of the same copies
            yield LinkUse(track.value, len(copies), nbytes, seconds, nbytes / seconds, rate)


def _by_track(steps: Sequence[PlannedStep], *, measured: bool) -> Tracks:
    found: Tracks = defaultdict(list)
    for step in steps:
        timeline = step.measured if measured else step.predicted
        for each in () if timeline is None else slices(step, timeline):
            if each.buffer is not None and not (measured and _half_seen(step, each.track)):
                found[each.track] += [each] * step.calls
    return {track: found[track] for track in Track if track in found}


def _half_seen(step: PlannedStep, track: Track) -> bool:
    """Whether only a part of such a copy is timed: one to a disk by way of the host."""
    by_way = step.problem.hardware.capacity(Tier.HOST) > 0
    return by_way and track in (Track.DISK_OUT, Track.DISK_IN)


def _total(copies: Sequence[Slice]) -> tuple[int, float]:
    return sum(each.nbytes for each in copies), sum(each.seconds for each in copies)
