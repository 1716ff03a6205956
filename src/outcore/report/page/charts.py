"""charts: compute coordinates, axis ticks and SVG paths of charts.

Every drawing is 1000 wide and 100 high, and the page stretches it to its frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor, log10
from typing import NamedTuple

from outcore.report.levels import Level

WIDTH, HEIGHT = 1000.0, 100.0
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_BINARY_ROUND = tuple(2.0**k for k in range(11))


class Tick(NamedTuple):
    """A label on an axis, at `percent` (0 to 100) of its length."""

    percent: float
    label: str


def number(value: float) -> str:
    """A coordinate in few characters."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def round_steps(extent: float, most: int) -> list[float]:
    """Round numbers from 0 to `extent`: 0 and at most `most` more."""
    if extent <= 0:
        return [0.0]
    least = extent / most
    size = 10.0 ** floor(log10(least))
    step = next(size * each for each in _ROUND if size * each >= least * (1 - 1e-9))
    return [step * i for i in range(floor(extent / step * (1 + 1e-9)) + 1)]


def binary_steps(extent: int, most: int) -> list[int]:
    """Round numbers of bytes from 0 to `extent`: 0 and at most `most` more."""
    unit = 1024.0 ** max(0, int(log10(max(1, extent)) / log10(1024)))
    steps = [max(1.0, unit * each / 4) for each in _BINARY_ROUND] + [unit * 1024]
    step = next(each for each in steps if extent / each <= most)
    return [round(step * i) for i in range(floor(extent / step) + 1)]


def area(found: Sequence[Level], start: float, extent: float, top: int) -> str:
    """The path of what is held over time, closed along the bottom. `top`: bytes at the top."""
    if not found or extent <= 0:
        return ""
    first = number((found[0].seconds - start) / extent * WIDTH)
    points = "".join(_steps(found, first, start, extent, top))
    return f"M{first} {number(HEIGHT)}{points}V{number(HEIGHT)}Z"


def _steps(
    found: Sequence[Level], first: str, start: float, extent: float, top: int
) -> Iterator[str]:
    before = first, number(HEIGHT)
    for level in found:
        x = number((level.seconds - start) / extent * WIDTH)
        y = number(HEIGHT * (1 - level.nbytes / top))
        if y != before[1]:
            yield f"H{x}V{y}" if x != before[0] else f"V{y}"
        elif x != before[0]:
            yield f"H{x}"
        before = x, y


def line(points: Iterable[tuple[float, float]]) -> str:
    """The path through points: fractions (0 to 1) of the width, and of the height from below."""
    return "".join(
        f"{'L' if index else 'M'}{number(x * WIDTH)} {number(HEIGHT * (1 - y))}"
        for index, (x, y) in enumerate(points)
    )


def dots(points: Iterable[tuple[float, float]]) -> str:
    """A path with a dot at each point: a stroke of length 0, which round line ends make a dot."""
    return "".join(f"M{number(x * WIDTH)} {number(HEIGHT * (1 - y))}h0" for x, y in points)
