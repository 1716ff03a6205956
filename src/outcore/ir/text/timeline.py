"""timeline: print and read the text form of a Timeline."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.ir.profile import Source
from outcore.ir.program import Stream
from outcore.ir.text.rows import Lines, read_rows
from outcore.ir.text.scan import Line
from outcore.ir.timeline import Cause, Span, Stall, Timeline


def print_timeline(timeline: Timeline) -> Iterator[str]:
    """The lines of a Timeline."""
    yield f"timeline {timeline.source.value}"
    for tier, nbytes in timeline.peak_bytes:
        yield f"peak {tier.value} {nbytes} B"
    for span in timeline.spans:
        start, stop = float(span.start_seconds), float(span.stop_seconds)
        yield f"span {span.instruction} {span.stream.value} {start!r} s {stop!r} s"
    for stall in timeline.stalls:
        yield f"stall {stall.instruction} {stall.cause.value} {float(stall.seconds)!r} s"


def read_timeline(lines: Lines) -> Timeline:
    """A Timeline from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("timeline")
    source = head.member(Source)
    head.end()
    rows = read_rows(rest, {"peak": Line.tier_bytes, "span": _span, "stall": _stall})
    return Timeline(rows["span"], rows["stall"], rows["peak"], source)


def _span(line: Line) -> Span:
    return Span(line.integer(), line.member(Stream), line.seconds(), line.seconds())


def _stall(line: Line) -> Stall:
    return Stall(line.integer(), line.member(Cause), line.seconds())
