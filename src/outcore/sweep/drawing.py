"""drawing: draw a sweep: slowdown over budget, a line for each policy, and the lower bound."""

from __future__ import annotations

from itertools import cycle
from math import nan
from pathlib import Path
from typing import Any

from outcore.report.style import COLORS, DPI, GIB, GRAY, PALE, check_plot
from outcore.sweep.table import Sweep

MARKERS = "osD^vPX*"
STYLES = ("-", "--", "-.", ":")
"""Line styles: the next one each time the colors start over."""
MARGIN = 0.05
"""Free space below and above what is drawn, as a fraction of the height."""
LOGARITHMIC = 2.0
"""Above this slowdown the scale is logarithmic."""
TICKS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, *(m * 2.0**k for k in range(2, 12) for m in (1, 1.5)))
"""Candidate ticks of the logarithmic scale; those inside its limits are used."""
FAR = 0.5
"""How far from the swept budgets a mark is still drawn, as a fraction of their range."""


def plot(found: Sweep, title: str, file: Path) -> None:
    """Draw `found` into `file`. Raises what `check_plot` raises."""
    check_plot(file)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    _scale(axes, found)
    _draw_policies(axes, found)
    _draw_bound(axes, found)
    _draw_marks(axes, found)
    _dress(axes, found)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(file, dpi=DPI)


def _scale(axes: Any, found: Sweep) -> None:
    """Set the limits of the slowdown axis, with room for a bound of 1."""
    known = (each for policy in found.policies for each in found.slowdowns(policy) if each)
    most = max(known, default=1.0)
    if most > LOGARITHMIC:
        axes.set_yscale("log")
        axes.set_ylim(most**-MARGIN, most ** (1 + MARGIN))
        axes.set_yticks([tick for tick in TICKS if tick < most ** (1 + MARGIN)])
        axes.minorticks_off()
    else:
        margin = MARGIN * max(most - 1, 0.2)
        axes.set_ylim(1 - margin, most + margin)


def _draw_policies(axes: Any, found: Sweep) -> None:
    """Draw a line for each policy, with gaps where it has no plan; list those without any too."""
    looks = cycle((*look, style) for style in STYLES for look in zip(COLORS, MARKERS, strict=True))
    for policy, (color, marker, style) in zip(found.policies, looks, strict=False):
        slowdowns = found.slowdowns(policy)
        axes.plot(
            _gib(found.budgets),
            [nan if each is None else each for each in slowdowns],
            color=color,
            marker=marker,
            linestyle=style,
            markersize=4.5,
            linewidth=1.6,
            zorder=3,
            label=policy if found.has_plan(policy) else f"{policy}: no plan",
        )


def _draw_bound(axes: Any, found: Sweep) -> None:
    """Fill the area below the lower bound, if it is known and there is a time to compare it to."""
    bounds = found.bounds()
    if not bounds or not found.in_core_seconds:
        return
    budgets = tuple(budget for budget in found.budgets if budget in bounds)
    heights = [bounds[budget] / found.in_core_seconds for budget in budgets]
    bottom = axes.get_ylim()[0]
    axes.fill_between(_gib(budgets), bottom, heights, color=PALE, label="below the lower bound")
    axes.plot(_gib(budgets), heights, color=GRAY, linewidth=0.8)


def _draw_marks(axes: Any, found: Sweep) -> None:
    """Mark the floor and the in-core peak, if they are not far from the swept budgets."""
    first, last = min(found.budgets), max(found.budgets)
    reach = FAR * (last - first)
    for nbytes, style, label in (
        (found.floor_bytes, ":", "floor"),
        (found.in_core_peak_bytes, "--", "in-core peak"),
    ):
        if first - reach <= nbytes <= last + reach:
            axes.axvline(nbytes / GIB, color=GRAY, linestyle=style, linewidth=1, label=label)


def _dress(axes: Any, found: Sweep) -> None:
    """Label the axes, with percentages of the in-core peak along the top."""
    axes.yaxis.set_major_formatter(lambda slowdown, _: f"{slowdown:.4g}x")
    axes.set_ylabel("step time / step time in-core")
    axes.set_xlabel("device budget, GiB")
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_color(PALE)
    if found.in_core_peak_bytes:
        _add_shares(axes, found.in_core_peak_bytes / GIB)


def _add_shares(axes: Any, peak: float) -> None:
    """Add an axis along the top, with percentages of `peak`, in GiB."""
    share = axes.secondary_xaxis("top", functions=(lambda x: x / peak, lambda x: x * peak))
    share.xaxis.set_major_formatter(lambda part, _: f"{100 * part:.4g}%")
    share.set_xlabel("of the in-core peak", fontsize=8, color=GRAY)
    share.tick_params(labelsize=8, colors=GRAY)
    share.spines["top"].set_color(PALE)


def _gib(sizes: tuple[int, ...]) -> list[float]:
    return [nbytes / GIB for nbytes in sizes]
