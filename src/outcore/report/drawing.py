"""drawing: draw the timelines and the memory of a Report with matplotlib (an extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.errors import OptionValueError
from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.timeline import Timeline
from outcore.report.figures import Report
from outcore.report.levels import levels
from outcore.report.planned import PlannedStep, longest
from outcore.report.style import COLORS, DPI, GIB, GRAY, NEAR, PALE, check_plot
from outcore.report.tracks import Kind, Track, pauses, slices
from outcore.units import format_bytes

WAIT = "waiting"
LOOKS = {
    Kind.FORWARD.value: COLORS[0],
    Kind.BACKWARD.value: COLORS[2],
    Kind.RERUN.value: COLORS[4],
    Kind.OUT.value: COLORS[3],
    Kind.IN.value: COLORS[5],
    WAIT: COLORS[1],
}
WIDTH, ROW, MEMORY = 10.0, 0.35, 2.2
"""Inches: width of the figure, height of a track, height of a memory chart."""


def draw(report: Report, file: Path) -> None:
    """Draw each graph's timelines, predicted above measured, and the device memory below them.

    Raises what `check_plot` raises, and OptionValueError if nothing is planned.
    """
    check_plot(file)
    if not report.steps:
        reason = "there is nothing to draw: nothing is planned"
        if report.state == "profiling":
            reason += " yet, as the first steps are being measured; train some more"
        raise OptionValueError(option="plot", value=str(file), reason=reason)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    steps = [report.steps[i] for i in longest(report.steps)]
    heights = [height for step in steps for height in _heights(step)]
    size = WIDTH, sum(heights) + 1.2 * len(steps) + 0.8
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for index, step in enumerate(steps):
        above, below = axes[2 * index], axes[2 * index + 1]
        extent = max(timeline.seconds for timeline in step.timelines)
        _draw_timelines(above, step)
        _draw_memory(below, report, step)
        for each in (above, below):
            each.set_xlim(0, extent or 1)
            each.spines[["top", "right"]].set_color(PALE)
        below.set_xlabel("seconds")
    title = f"{report.title or 'a training step'}, {report.policy}"
    if len(steps) < len(report.steps):
        title += f" ({len(steps)} of {len(report.steps)} graphs)"
    title = title.encode(errors="replace").decode()  # no font has half a surrogate pair
    axes[0].set_title(title, loc="left", fontsize=10, parse_math=False)
    drawn = {name for step in steps for name in _drawn(step)}
    handles = [_patch(color, name) for name, color in LOOKS.items() if name in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(file, dpi=DPI)


def _drawn(step: PlannedStep) -> set[str]:
    """The names of the kinds that the timelines show, as in `LOOKS`."""
    found = {each.kind.value for t in step.timelines for each in slices(step, t)}
    return found | {WAIT} if any(t.stalls for t in step.timelines) else found


def _heights(step: PlannedStep) -> tuple[float, float]:
    return ROW * max(2, len(_tracks(step))), MEMORY


def _tracks(step: PlannedStep) -> list[tuple[Timeline, Track]]:
    """Every track that has slices, of every timeline, from top to bottom."""
    return [
        (timeline, track)
        for timeline in step.timelines
        for track in Track
        if any(each.track is track for each in slices(step, timeline))
    ]


def _draw_timelines(axes: Any, step: PlannedStep) -> None:
    shown = _tracks(step)
    for row, (timeline, track) in enumerate(shown):
        start = min(span.start_seconds for span in timeline.spans)
        places: dict[str, list[tuple[float, float]]] = {}
        for each in slices(step, timeline):
            if each.track is track:
                place = each.start_seconds - start, each.seconds
                places.setdefault(each.kind.value, []).append(place)
        if track is Track.COMPUTE:
            places[WAIT] = [
                (each.start_seconds - start, each.stop_seconds - each.start_seconds)
                for each in pauses(timeline)
            ]
        for kind, found in places.items():
            axes.broken_barh(found, (row - 0.4, 0.8), color=LOOKS[kind], linewidth=0)
    names = {Source.SIMULATED: "predicted", Source.MEASURED: "measured"}
    labels = [f"{names[timeline.source]} {track.value}" for timeline, track in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)


def _draw_memory(axes: Any, report: Report, step: PlannedStep) -> None:
    """Draw what the device is predicted to hold, and the budget as a line."""
    found = levels(step, step.predicted, Tier.DEVICE)
    most = max(each.nbytes for each in found)
    unit, unit_bytes = _unit(most)
    seconds = [each.seconds for each in found]
    sizes = [each.nbytes / unit_bytes for each in found]
    axes.fill_between(seconds, sizes, step="post", color=COLORS[5], alpha=0.6, linewidth=0)
    budget = step.problem.budget_bytes
    lines = [(budget, COLORS[1], f"budget {format_bytes(budget)}")]
    if report.measured_peak_bytes is not None and not report.several_graphs:
        nbytes = report.measured_peak_bytes
        lines.append((nbytes, GRAY, f"measured peak {format_bytes(nbytes)}"))
    if budget > NEAR * most:
        del lines[0]
        axes.set_title(f"budget {format_bytes(budget)}", loc="right", fontsize=8, color=COLORS[1])
    for nbytes, color, label in lines:
        axes.axhline(nbytes / unit_bytes, color=color, linestyle="--", linewidth=1.2)
        axes.text(
            1,
            nbytes / unit_bytes,
            label,
            transform=axes.get_yaxis_transform(),
            color=color,
            ha="right",
            va="bottom",
            fontsize=8,
        )
    axes.set_ylim(0, 1.15 * max(*sizes, *(nbytes / unit_bytes for nbytes, _, _ in lines)))
    axes.set_ylabel(f"device, {unit}", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)


def _unit(nbytes: int) -> tuple[str, int]:
    """The unit (name and bytes) in which `nbytes` is a short number."""
    units = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
    return next((each for each in units if nbytes >= each[1]), units[-1])


def _patch(color: str, name: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

    return Patch(color=color, label=name)
