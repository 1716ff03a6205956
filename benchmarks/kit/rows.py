"""Row: one line of a benchmark's table, with the goals that it is checked against."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """A goal with the figure that was found, and whether it was reached."""

    goal: str
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The base of all rows. Fields are plain values, and None if there is no such figure.

    Names show units: `..._bytes`, `..._seconds`, `..._ratio`, `..._share` (1 is everything),
    `bytes_per_second`, `flop_per_second`.
    """

    checks: tuple[Check, ...] = ()
    note: str = ""
    """Why figures are missing, if any are."""


def at_most(what: str, figure: float | None, limit: float) -> tuple[Check, ...]:
    """The check that `figure`, a ratio, is at most `limit`; no check if there is no figure."""
    if figure is None:
        return ()
    return (Check(f"{what} {figure:.3f} at most {limit:g}", figure <= limit),)


def ratio(figure: float | None, of: float | None) -> float | None:
    """`figure / of`, or None if one of them is unknown or zero."""
    return figure / of if figure and of else None


def values(row: Row) -> dict[str, Any]:
    """The fields of a row by name: its own first, those common to all rows last."""
    common = {field.name for field in fields(Row)}
    names = [f.name for f in fields(row)]
    ordered = [n for n in names if n not in common] + [n for n in names if n in common]
    return {name: getattr(row, name) for name in ordered}
