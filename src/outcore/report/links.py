"""links: compare the planned and the measured rate of each link.

The difference between the two is contention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outcore.ir.hardware import Tier
from outcore.report.planned import PlannedStep
from outcore.report.tracks import Slice, Track, slices
from outcore.units import format_rate


class _Moved(NamedTuple):
    """The copies of a step over one track. Averages if graphs take turns."""

    copies: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0

    def and_also(self, each: Slice, often: float) -> _Moved:
        copies, nbytes = self.copies + often, self.nbytes + often * each.nbytes
        return _Moved(copies, nbytes, self.seconds + often * each.seconds)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One direction of a link in one step. Rates are bytes per second while a copy is running."""

    name: str
    """The track, such as `out to host`."""
    copies: int
    """Copies in a step."""
    nbytes: int
    """Bytes copied in a step."""
    busy_seconds: float
    """Predicted seconds in which the link is busy."""
    rate: float
    """The rate that the prediction uses: of copies during compute, if that could be measured."""
    measured_rate: float | None = None
    """Rate of these copies in a recorded step (`Backend.record_step`); None if any is missing."""

    def __str__(self) -> str:
        """For people: both rates, and the measured one as a percentage of the planned one."""
        planned = f"{format_rate(self.rate)} planned"
        if self.measured_rate is None:
            return planned
        ratio = self.measured_rate / self.rate
        return f"{planned}, {format_rate(self.measured_rate)} measured ({ratio:.0%})"


def link_uses(steps: Sequence[PlannedStep]) -> tuple[LinkUse, ...]:
    """Each direction that copies use, summed over the graphs of a step."""
    planned, heard = _by_track(steps, measured=False), _by_track(steps, measured=True)
    return tuple(_uses(planned, heard))


def _uses(planned: dict[Track, _Moved], heard: dict[Track, _Moved]) -> Iterator[LinkUse]:
    for track, moved in planned.items():
        copies, nbytes = round(moved.copies), round(moved.nbytes)
        if moved.seconds > 0:
            done = heard.get(track, _Moved())
            same = round(done.nbytes) == nbytes and done.seconds > 0
            rate = done.nbytes / done.seconds if same else None
            planned_rate = moved.nbytes / moved.seconds
            yield LinkUse(track.value, copies, nbytes, moved.seconds, planned_rate, rate)


def _by_track(steps: Sequence[PlannedStep], *, measured: bool) -> dict[Track, _Moved]:
    found: dict[Track, _Moved] = defaultdict(_Moved)
    for step in steps:
        timeline = step.measured if measured else step.predicted
        for each in () if timeline is None else slices(step, timeline):
            if each.buffer is not None and not (measured and _half_seen(step, each.track)):
                found[each.track] = found[each.track].and_also(each, step.often)
    return {track: found[track] for track in Track if track in found}


def _half_seen(step: PlannedStep, track: Track) -> bool:
    """Whether only a part of such a copy is timed: between device and disk, through the host."""
    by_way = step.problem.hardware.capacity(Tier.HOST) > 0
    return by_way and track in (Track.DISK_OUT, Track.DISK_IN)
