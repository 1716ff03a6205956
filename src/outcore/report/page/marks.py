"""marks: turn the slices of a timeline into boxes, merging short neighbors into one box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from outcore.ir.timeline import Cause
from outcore.report.tracks import Kind, Slice, StallSpan, Track
from outcore.units import format_bytes, format_seconds

FINEST = 1 / 2000
"""Slices within this fraction of the time axis share a box: it is less than a pixel."""
COARSEST = 1 / 200
"""Limit for boxes of one kind: beyond this fraction of the axis, boxes mix kinds instead."""
GROWTH = 1.5
NAMED = 3
"""How many different ops or buffers a box of several slices names."""

Spanned = TypeVar("Spanned", Slice, StallSpan)
Label = TypeVar("Label", Kind, Cause)

LOOKS = {
    "forward": "forward",
    "backward": "backward",
    "rerun": "computed again",
    "out": "copied out",
    "in": "copied back",
    "wait": "waiting",
}
"""Map names of kinds in the style sheet to their names in the legend."""

_WAITS = {
    Cause.FETCH: "compute waits for a copy back",
    Cause.RELEASE: "compute waits for a copy out, to free its memory",
    Cause.PACE: "compute waits, as the plan asks",
}


class Mark(NamedTuple):
    """One box, from `start` to `stop` in seconds, that stands for `spans` slices (0 for a wait)."""

    start: float
    stop: float
    look: str
    words: str
    spans: int


class Row(NamedTuple):
    """One track of a timeline: the boxes of its `slices` slices, and those of the waits between."""

    track: Track
    busy_seconds: float
    slices: int
    marks: list[Mark]
    waits: list[Mark]


def rows(found: Sequence[Slice], waits: Sequence[StallSpan], extent: float, most: int) -> list[Row]:
    """A row for each track that has slices, with about `most` boxes in total.

    A row has at least one box. The compute row has at least one more if there are waits.
    """
    by_track = {track: _sorted(found, track) for track in Track}
    groups: list[list[list[Slice]]] = []
    stops: list[list[StallSpan]] = []
    for width, mixed in _widths(extent):
        groups = [list(_groups(mine, _kind, width, mixed)) for mine in by_track.values()]
        stops = list(_groups(waits, _cause, width, mixed))
        if sum(map(len, groups)) + len(stops) <= most:
            break
    return [
        _row(track, drawn, stops if track is Track.COMPUTE else [])
        for track, drawn in zip(by_track, groups, strict=True)
        if drawn
    ]


def _sorted(found: Sequence[Slice], track: Track) -> list[Slice]:
    mine = (each for each in found if each.track is track)
    return sorted(mine, key=lambda each: (each.start_seconds, each.position))


def _row(track: Track, groups: list[list[Slice]], stops: list[list[StallSpan]]) -> Row:
    mine = [each for group in groups for each in group]
    busy = sum(each.seconds for each in mine)
    return Row(track, busy, len(mine), [*map(_mark, groups)], [*map(_pause, stops)])


def _kind(each: Slice) -> Kind:
    return each.kind


def _cause(each: StallSpan) -> Cause:
    return each.cause


def _widths(extent: float) -> Iterator[tuple[float, bool]]:
    """Widths to try: (seconds within which slices share a box, whether kinds are mixed).

    Kinds are mixed only after wider boxes of one kind were tried. Those never help if kinds
    alternate. The last width puts everything into one box.
    """
    yield from ((width, False) for width in _growing(extent, COARSEST))
    yield from ((width, True) for width in _growing(extent, 1.0))


def _growing(extent: float, last: float) -> Iterator[float]:
    part = FINEST
    while part < last:
        yield extent * part
        part *= GROWTH
    yield extent * last


def _groups(
    found: Iterable[Spanned],
    kind: Callable[[Spanned], object],
    width: float,
    mixed: bool,  # noqa: FBT001 - passed on
) -> Iterator[list[Spanned]]:
    """Neighbors that lie within `width`, and are of one kind unless `mixed`."""
    group: list[Spanned] = []
    for each in found:
        alike = mixed or not group or kind(group[0]) is kind(each)
        if group and not (alike and each.stop_seconds - group[0].start_seconds <= width):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _mark(group: Sequence[Slice]) -> Mark:
    """One box. If kinds are mixed, it looks like the kind with the most time in it."""
    first, last = group[0], group[-1]
    words = first.words if len(group) == 1 else _together(group)
    times = _times((each.kind, each.seconds) for each in group)
    return Mark(first.start_seconds, last.stop_seconds, look(next(iter(times))), words, len(group))


def _together(group: Sequence[Slice]) -> str:
    """A description of several slices in one line: what, how many, how long, how many bytes."""
    first = group[0]
    names = Counter(each.name for each in group).most_common()
    named = ", ".join(f"{count} x {name}" for name, count in names[:NAMED])
    more = ", ..." if len(names) > NAMED else ""
    busy = format_seconds(sum(each.seconds for each in group))
    nbytes = sum(each.nbytes for each in group)
    size = f" of {format_bytes(nbytes)}" if nbytes else ""
    what = "ops" if first.op is not None else "copies"
    at = f"{busy} from {format_seconds(first.start_seconds)}"
    return f"{len(group)} {what}{size}, {_kinds(group)}: {named}{more}; {at}"


def _kinds(group: Sequence[Slice]) -> str:
    """The kind. If there are several, each with its count, the most frequent first."""
    counts = Counter(each.kind.value for each in group).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return " and ".join(f"{count} {kind}" for kind, count in counts)


def _pause(group: Sequence[StallSpan]) -> Mark:
    first, last = group[0], group[-1]
    times = _times((each.cause, each.stop_seconds - each.start_seconds) for each in group)
    often = "" if len(group) == 1 else f", {len(group)} times"
    at = f"{format_seconds(sum(times.values()))} from {format_seconds(first.start_seconds)}{often}"
    words = "; ".join(_WAITS[cause] for cause in times)
    return Mark(first.start_seconds, last.stop_seconds, "wait", f"{words}: {at}", 0)


def _times(found: Iterable[tuple[Label, float]]) -> dict[Label, float]:
    """Map each label to its total seconds, the longest first."""
    times: dict[Label, float] = {}
    for label, seconds in found:
        times[label] = times.get(label, 0.0) + seconds
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def look(kind: Kind) -> str:
    """The name of a kind in the style sheet."""
    return kind.name.lower()
