"""Figure: one line of the page, which compares a printed figure with the modeled one.

Each line has a goal: a statement of the paper. It is reached if our figure is in the printed range,
differs from the printed number by at most a tenth, or equals the printed fact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.kit.rows import Check, Row

NEAR = 0.1
"""The fraction of a printed number by which ours may differ."""

NONE = "no plan"

Text = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Row):
    """A figure. `source` says where it is printed; `ours` is always modeled."""

    source: str
    what: str
    paper: str
    ours: str
    difference: str = ""


def number(
    source: str, what: str, paper: float, ours: float | None, text: Text = str, note: str = ""
) -> Figure:
    """Compare with a printed number."""
    if ours is None:
        return _figure(source, what, text(paper), NONE, NONE, met=False, note=note)
    apart = ours / paper - 1
    near = abs(apart) <= NEAR
    return _figure(source, what, text(paper), text(ours), f"{apart:+.0%}", met=near, note=note)


def span(
    source: str,
    what: str,
    paper: tuple[float, float],
    ours: Sequence[float | None],
    text: Text = str,
    note: str = "",
) -> Figure:
    """Compare with a printed range, over the same cases. All of ours must lie in it."""
    known = [each for each in ours if each is not None]
    missing = len(ours) - len(known)
    low, high = paper
    printed = text(high) if low == 0 else _between(text, low, high)
    printed = f"up to {printed}" if low == 0 else printed
    if not known:
        return _figure(source, what, printed, NONE, NONE, met=False, note=note)
    below, above = low - min(known), max(known) - high
    words = [f"{text(below)} below" * (below > 0), f"{text(above)} above" * (above > 0)]
    words.append(f"{missing} without a plan" * bool(missing))
    difference = ", ".join(filter(None, words)) or "inside"
    met = difference == "inside"
    shown = _between(text, min(known), max(known))
    return _figure(source, what, printed, shown, difference, met=met, note=note)


def fact(source: str, what: str, paper: str, ours: str, note: str = "") -> Figure:
    """Compare with a printed fact, or with counts: the same or not."""
    same = paper == ours
    return _figure(source, what, paper, ours, "same" if same else "other", met=same, note=note)


def _between(text: Text, low: float, high: float) -> str:
    return text(low) if text(low) == text(high) else f"{text(low)} to {text(high)}"


def _figure(
    source: str, what: str, paper: str, ours: str, difference: str, *, met: bool, note: str
) -> Figure:
    goal = Check(f"{source}, {what}: paper {paper}, ours {ours}", met)
    return Figure(
        source=source,
        what=what,
        paper=paper,
        ours=ours,
        difference=difference,
        checks=(goal,),
        note=note,
    )


def percent(share: float) -> str:
    """A share as text, where 1 is everything."""
    return f"{share:.1%}"


def times(ratio: float) -> str:
    """A ratio as text."""
    return f"{ratio:.2f}x"


def gigabytes(nbytes: float) -> str:
    """Bytes in powers of ten, as in the papers."""
    return f"{nbytes / 1e9:.2f} GB"


def mebibytes(nbytes: float) -> str:
    """Bytes in powers of two, as SuperNeurons counts."""
    return f"{nbytes / 2**20:.3f} MiB"
