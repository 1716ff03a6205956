"""graph: lay out the drawings of one graph: its timelines, and its memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outcore.ir.hardware import Tier
from outcore.ir.memory import peak
from outcore.ir.profile import Source
from outcore.ir.program import Run
from outcore.ir.timeline import Timeline
from outcore.report.figures import Report
from outcore.report.levels import levels, thinned
from outcore.report.page.charts import HEIGHT, WIDTH, Tick, area, binary_steps, number, round_steps
from outcore.report.page.marks import Mark, Row, rows
from outcore.report.page.words import spell_budget
from outcore.report.planned import PlannedStep
from outcore.report.style import NEAR
from outcore.report.tracks import pauses, slices
from outcore.units import format_bytes, format_seconds

TICKS = 5
NARROWEST = 0.3
"""The least width of a box, where the chart is 1000 wide."""
HEADROOM = 1.15
"""Height of the chart relative to its highest line, to leave room for that line's label."""
LABEL = 9.0
"""Height of a label, in percent of the chart's height."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a track. It stands for `spans` slices; a wait has 0."""

    x: str
    width: str
    look: str
    words: str
    spans: int


@dataclass(frozen=True, slots=True)
class TrackView:
    """One track of a timeline."""

    name: str
    text: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class TimelineView:
    """One timeline. `backward` is the x (0 to 1000) at which the backward pass begins, or None."""

    source: str
    text: str
    tracks: tuple[TrackView, ...]
    backward: str | None


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line in a memory chart, `percent` from the top."""

    percent: float
    y: str
    look: str
    label: str


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The chart of what one tier holds over time."""

    tier: str
    text: str
    path: str
    axis: tuple[Tick, ...]
    ticks: tuple[Tick, ...]
    lines: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class GraphView:
    """All drawings of one graph."""

    name: str
    ticks: tuple[Tick, ...]
    timelines: tuple[TimelineView, ...]
    memory: tuple[MemoryView, ...]
    shown: int
    """Slices that the boxes stand for."""
    merged: int
    """Slices that share a box with others."""
    looks: frozenset[str]
    """The looks of all boxes, for the legend."""


def graph_view(report: Report, step: PlannedStep, name: str, most: int, points: int) -> GraphView:
    """The drawings of `step`, with about `most` boxes; all timelines share one time axis.

    Its memory curves have about `points` points in total.
    """
    extent = max(timeline.seconds for timeline in step.timelines)
    share = most // len(step.timelines)
    found = [
        (timeline, rows(slices(step, timeline), pauses(timeline), extent, share))
        for timeline in step.timelines
    ]
    all_rows = [row for _, drawn in found for row in drawn]
    return GraphView(
        name,
        _axis(extent),
        tuple(_timeline(step, timeline, drawn, extent) for timeline, drawn in found),
        tuple(_memory(report, step, points)),
        sum(row.slices for row in all_rows),
        sum(mark.spans for row in all_rows for mark in row.marks if mark.spans > 1),
        frozenset(mark.look for row in all_rows for mark in (*row.marks, *row.waits)),
    )


def _axis(extent: float) -> tuple[Tick, ...]:
    """Round times, in percent from the left."""
    return tuple(
        Tick(100 * t / extent if extent else 0.0, format_seconds(t))
        for t in round_steps(extent, TICKS)
    )


def _timeline(
    step: PlannedStep, timeline: Timeline, drawn: list[Row], extent: float
) -> TimelineView:
    simulated = timeline.source is Source.SIMULATED
    waited = timeline.stall_seconds()
    text = format_seconds(timeline.seconds)
    text += f", of which compute waits {format_seconds(waited)}" if waited else ", without waits"
    tracks = (_track(row, _start(timeline), extent) for row in drawn)
    return TimelineView(
        "predicted" if simulated else "measured",
        text,
        tuple(tracks),
        _backward(step, timeline, extent),
    )


def _start(timeline: Timeline) -> float:
    return min((span.start_seconds for span in timeline.spans), default=0.0)


def _track(row: Row, start: float, extent: float) -> TrackView:
    text = f"{row.slices} spans, busy {format_seconds(row.busy_seconds)}"
    marks = sorted((*row.marks, *row.waits), key=lambda mark: mark.start)
    return TrackView(row.track.value, text, tuple(_box(mark, start, extent) for mark in marks))


def _box(mark: Mark, start: float, extent: float) -> Box:
    x = (mark.start - start) / extent * WIDTH if extent else 0.0
    width = (mark.stop - mark.start) / extent * WIDTH if extent else 0.0
    return Box(number(x), number(max(NARROWEST, width)), mark.look, mark.words, mark.spans)


def _backward(step: PlannedStep, timeline: Timeline, extent: float) -> str | None:
    """The x at which the first run of the backward pass starts; None if there is none."""
    body, boundary = step.program.body, step.program.boundary
    starts = (
        span.start_seconds
        for span in timeline.spans
        if span.instruction >= boundary and isinstance(body[span.instruction].action, Run)
    )
    first = min(starts, default=None)
    if first is None or not extent:
        return None
    return number((first - _start(timeline)) / extent * WIDTH)


def _memory(report: Report, step: PlannedStep, points: int) -> Iterator[MemoryView]:
    """A chart for each tier that holds anything."""
    timeline, extent = step.predicted, step.predicted.seconds
    by_tier = {tier: levels(step, timeline, tier) for tier in Tier}
    held = {tier: found for tier, found in by_tier.items() if any(each.nbytes for each in found)}
    for tier, found in held.items():
        most = max(level.nbytes for level in found)
        limit = step.problem.limit_bytes(tier)
        device = tier is Tier.DEVICE
        drawn = limit if limit <= NEAR * most else 0
        alone = device and not report.several_graphs
        measured = report.measured_peak_bytes if alone else None
        top = max(1, round(max(most, drawn, measured or 0) * HEADROOM))
        yield MemoryView(
            tier=tier.value,
            text=_peak_words(step, drawn) if device else _outer_words(step, tier, most, limit),
            path=area(thinned(found, points // len(held)), _start(timeline), extent, top),
            axis=_axis(extent),
            ticks=tuple(_ticks(top)),
            lines=tuple(_lines(device, drawn, measured, top)),
        )


def _ticks(top: int) -> Iterator[Tick]:
    """Round sizes, as long as a label above the line still fits in the chart."""
    for nbytes in binary_steps(top, TICKS):
        percent = 100 * (1 - nbytes / top)
        if percent >= LABEL:
            yield Tick(percent, format_bytes(nbytes) if nbytes else "0")


def _lines(device: bool, limit: int, measured: int | None, top: int) -> Iterator[Level]:  # noqa: FBT001 - which tier
    if limit:
        name = f"budget {spell_budget(limit)}" if device else f"limit {format_bytes(limit)}"
        yield _level(limit, top, "budget", name)
    if measured:
        yield _level(measured, top, "peak", f"measured peak {format_bytes(measured)}")


def _level(nbytes: int, top: int, look: str, label: str) -> Level:
    part = 1 - nbytes / top
    return Level(100 * part, number(HEIGHT * part), look, label)


def _peak_words(step: PlannedStep, drawn: int) -> str:
    """The peak, and the op at which it occurs; before that the budget, unless it is drawn."""
    highest = peak(step.problem, step.program, Tier.DEVICE)
    text = f"at most {format_bytes(highest.nbytes)}"
    if not drawn:
        text += f" of a budget of {spell_budget(step.problem.budget_bytes)}"
    at_work = replace(step.problem, between_bytes=0)
    if peak(at_work, step.program, Tier.DEVICE).nbytes < highest.nbytes:
        return f"{text}, between the forward call and the backward call"
    later = step.program.body[highest.position :]
    run = next((x.action for x in later if isinstance(x.action, Run)), None)
    if run is None:
        return text
    op = step.problem.trace.ops[run.op]
    place = f", {op.site}" if op.site else ""
    return f"{text}, at op {op.id} {op.target}{place}"


def _outer_words(step: PlannedStep, tier: Tier, most: int, limit: int) -> str:
    """How much of an outer tier is in use, how much it extends to, and its limit."""
    extent = step.predicted.peak(tier)
    text = f"at most {format_bytes(most)} in use"
    text += f", {format_bytes(extent)} taken" if extent > most else ""
    return f"{text}; limit {format_bytes(limit)}"
