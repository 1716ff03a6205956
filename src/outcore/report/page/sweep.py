"""sweep: the chart of slowdown over budget, with the lower bound that no plan can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from outcore.report.figures import Report
from outcore.report.page.charts import HEIGHT, WIDTH, Tick, binary_steps, dots, line, number
from outcore.report.planned import Swept
from outcore.units import format_bytes

TICKS = 5
SLOWDOWNS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
LEAST_TOP = 1.1
"""The slowdown axis reaches at least this far, so that it has an extent without slowdowns, too."""
LOWEST, HEADROOM = 0.08, 0.08
"""Fractions of the height left free below a slowdown of 1 and above the highest."""
APART = 7.0
"""Least distance of two labels, in percent of the height."""
LOOKS = 8
"""Number of colors for policies in the style sheet."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The line and the dots of one policy."""

    name: str
    look: str
    path: str
    dots: str


@dataclass(frozen=True, slots=True)
class SweepView:
    """The chart, and a table of the same figures."""

    curves: tuple[Curve, ...]
    bound: str
    """The path of the area that no plan can reach; empty if no bound is known."""
    budget: float | None
    """Where this report's budget is, in percent of the axis; None if it is not on the axis."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    table: tuple[tuple[str, ...], ...]
    bounded: bool
    """Whether any bound is known."""
    text: str


def sweep_view(found: Swept, report: Report) -> SweepView:
    """The slowdowns by budget, on axes from the smallest to the largest budget and from 1 up."""
    budgets, bounds = found.budgets, found.bounds()
    by_policy = {policy: found.slowdowns(policy) for policy in found.policies}
    known = [each for slowdowns in by_policy.values() for each in slowdowns if each is not None]
    axes = _Axes(budgets, max([LEAST_TOP, *known]))
    curves = (
        _curve(axes, name, index, budgets, slowdowns)
        for index, (name, slowdowns) in enumerate(by_policy.items())
    )
    in_core = found.in_core_seconds
    least = {budget: seconds / in_core for budget, seconds in bounds.items() if in_core}
    floor, needs = format_bytes(found.floor_bytes), format_bytes(found.in_core_peak_bytes)
    return SweepView(
        tuple(curves),
        _below(axes, [(budget, least[budget]) for budget in budgets if budget in least]),
        axes.percent(report.budget_bytes),
        tuple(axes.x_ticks()),
        tuple(axes.y_ticks()),
        tuple(_row(budget, i, by_policy, least) for i, budget in enumerate(budgets)),
        bool(least),
        f"The smallest budget that any plan meets is {floor}; with {needs} nothing need be moved.",
    )


class _Axes:
    """The axes: budgets along, slowdowns up, on a logarithmic scale."""

    def __init__(self, budgets: Sequence[int], top: float) -> None:
        self.first, self.last = min(budgets), max(budgets)
        self.extent, self.top = max(1, self.last - self.first), top

    def place(self, budget: int, slowdown: float) -> tuple[float, float]:
        """Position as fractions of the width and of the height."""
        height = log(max(1.0, slowdown)) / log(self.top) * (1 - LOWEST - HEADROOM)
        return (budget - self.first) / self.extent, LOWEST + height

    def percent(self, budget: int) -> float | None:
        """Where a budget is on the axis, in percent; None if it is not on the axis."""
        part = (budget - self.first) / self.extent
        return 100 * part if 0 <= part <= 1 else None

    def x_ticks(self) -> list[Tick]:
        """Round sizes on the axis."""
        steps = binary_steps(self.last, TICKS)
        places = ((self.percent(size), size) for size in steps if size)
        found = [Tick(place, format_bytes(size)) for place, size in places if place is not None]
        ends = [Tick(0.0, format_bytes(self.first)), Tick(100.0, format_bytes(self.last))]
        return found if len(found) > 1 else ends

    def y_ticks(self) -> list[Tick]:
        """Slowdowns, in percent from the top."""
        found: list[Tick] = []
        for each in SLOWDOWNS:
            tick = Tick(100 * (1 - self.place(self.first, each)[1]), f"{each:g}x")
            if each <= self.top and (not found or found[-1].percent - tick.percent >= APART):
                found.append(tick)
        return found


def _curve(
    axes: _Axes, name: str, index: int, budgets: Sequence[int], slowdowns: Sequence[float | None]
) -> Curve:
    """A dot for each budget that has a plan, and lines between neighbors that both have one."""
    groups: list[list[tuple[float, float]]] = [[]]
    for budget, slowdown in zip(budgets, slowdowns, strict=True):
        if slowdown is None:
            groups.append([])
        else:
            groups[-1].append(axes.place(budget, slowdown))
    path = "".join(line(points) for points in groups)
    return Curve(name, f"curve{index % LOOKS}", path, "".join(dots(points) for points in groups))


def _below(axes: _Axes, least: list[tuple[int, float]]) -> str:
    """The path of the area that no plan can reach."""
    if not least:
        return ""
    points = [axes.place(*each) for each in least]
    start, stop = (number(points[i][0] * WIDTH) for i in (0, -1))
    return f"{line(points)}L{stop} {number(HEIGHT)}L{start} {number(HEIGHT)}Z"


def _row(
    budget: int,
    index: int,
    by_policy: dict[str, list[float | None]],
    least: dict[int, float],
) -> tuple[str, ...]:
    slowdowns = (_text(found[index]) for found in by_policy.values())
    return (format_bytes(budget), *slowdowns, _text(least.get(budget)))


def _text(slowdown: float | None) -> str:
    return "-" if slowdown is None else f"{slowdown:.3f}x"
