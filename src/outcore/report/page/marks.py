"""marks: the slices of a timeline as boxes on a page, short neighbours drawn as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from outcore.ir.timeline import Cause
from outcore.report.tracks import Kind, Pause, Slice, Track
from outcore.units import format_bytes, format_seconds

FINEST = 1 / 2000
"""Slices that lie within so much of the time axis are drawn as one: less than a pixel."""
NAMED = 3
"""So many different ops or buffers are named where several are drawn as one."""

_WAITS = {
    Cause.FETCH: "compute waits for a copy back",
    Cause.RELEASE: "compute waits for a copy out, to free its memory",
    Cause.PACE: "compute waits, as the plan asks",
}


class Mark(NamedTuple):
    """One box: from `start` to `stop` (seconds), standing for `spans` slices."""

    start: float
    stop: float
    look: str
    words: str
    spans: int


class Row(NamedTuple):
    """One track of one timeline, with the boxes of `slices` slices and of the waits between."""

    track: Track
    busy_seconds: float
    slices: int
    marks: list[Mark]
    waits: list[Mark]


def rows(found: Sequence[Slice], waits: Sequence[Pause], extent: float, most: int) -> list[Row]:
    """A row for each track that has slices, with about `most` boxes in all."""
    width = extent * FINEST
    while True:
        drawn = [_row(track, found, waits, width) for track in Track]
        if width <= 0 or sum(len(row.marks) + len(row.waits) for row in drawn) <= most:
            return [row for row in drawn if row.slices]
        width *= 1.5


def _row(track: Track, found: Sequence[Slice], waits: Sequence[Pause], width: float) -> Row:
    mine = sorted(
        (each for each in found if each.track is track),
        key=lambda each: (each.start_seconds, each.position),
    )
    marks = [_mark(group) for group in _groups(mine, width)]
    stops = waits if track is Track.COMPUTE else ()
    pauses = [_pause(group) for group in _pause_groups(stops, width)]
    return Row(track, sum(each.seconds for each in mine), len(mine), marks, pauses)


def _groups(found: Iterable[Slice], width: float) -> Iterator[list[Slice]]:
    """Neighbours of one kind that lie within `width`."""
    for _, alike in groupby(found, key=lambda each: each.kind):
        group: list[Slice] = []
        for each in alike:
            if group and each.stop_seconds - group[0].start_seconds > width:
                yield group
                group = []
            group.append(each)
        yield group


def _pause_groups(waits: Iterable[Pause], width: float) -> Iterator[list[Pause]]:
    group: list[Pause] = []
    for each in waits:
        alike = not group or group[0].cause is each.cause
        if group and not (alike and each.stop_seconds - group[0].start_seconds <= width):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _mark(group: Sequence[Slice]) -> Mark:
    first, last = group[0], group[-1]
    words = first.words if len(group) == 1 else _together(group)
    return Mark(first.start_seconds, last.stop_seconds, look(first.kind), words, len(group))


def _together(group: Sequence[Slice]) -> str:
    """Several slices in one line: what they are, where from, how long, how much."""
    first = group[0]
    names = Counter(each.name for each in group).most_common()
    named = ", ".join(f"{count} x {name}" for name, count in names[:NAMED])
    more = ", ..." if len(names) > NAMED else ""
    busy = format_seconds(sum(each.seconds for each in group))
    nbytes = sum(each.nbytes for each in group)
    size = f" of {format_bytes(nbytes)}" if nbytes else ""
    what = "ops" if first.op is not None else "copies"
    at = f"{busy} from {format_seconds(first.start_seconds)}"
    return f"{len(group)} {what}{size}, {first.kind.value}: {named}{more}; {at}"


def _pause(group: Sequence[Pause]) -> Mark:
    first, last = group[0], group[-1]
    seconds = sum(each.stop_seconds - each.start_seconds for each in group)
    times = "" if len(group) == 1 else f", {len(group)} times"
    at = f"{format_seconds(seconds)} from {format_seconds(first.start_seconds)}{times}"
    words = f"{_WAITS[first.cause]}: {at}"
    return Mark(first.start_seconds, last.stop_seconds, "wait", words, 0)


def look(kind: Kind) -> str:
    """The name of a kind in the style sheet."""
    return kind.name.lower()
