"""show: print rows as a text table, with units by the names of columns, without empty columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.kit.rows import Check, Row, values
from outcore.units import format_bytes, format_rate, format_seconds

NOTHING = "-"
_UNITS = ("_bytes_per_second", "_flop_per_second", "_bytes", "_seconds", "_ratio", "_share")


def table(rows: Sequence[Row]) -> str:
    """The rows of one benchmark, one line each, under the names of their columns."""
    names = [name for name in values(rows[0]) if name != "checks"]
    columns = [name for name in names if is_column([values(row)[name] for row in rows])]
    lines = [[heading(name) for name in columns] + ["goals"]]
    for row in rows:
        found = values(row)
        lines.append([cell(name, found[name]) for name in columns] + [goals(row.checks)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def verdict(rows: Iterable[Row]) -> str:
    """How many goals were reached, over all rows."""
    checks = [check for row in rows for check in row.checks]
    return f"{sum(c.met for c in checks)} of {len(checks)} goals reached"


def is_column(found: Sequence[object]) -> bool:
    """Whether the figures of one name make a column: there is one, and none is a whole report."""
    return any(value not in (None, "") for value in found) and dict not in map(type, found)


def heading(name: str) -> str:
    """A column's name without its unit."""
    for unit in _UNITS:
        name = name.removesuffix(unit) or name
    return name.replace("_", " ")


def cell(name: str, value: object) -> str:
    """A figure of the column `name` for people."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(name, value)
    return str(value)


def _number(name: str, value: float) -> str:
    if name.endswith("bytes_per_second"):
        return format_rate(value)
    if name.endswith("flop_per_second"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_seconds"):
        return format_seconds(value)
    if name.endswith("_share"):
        return f"{value:.0%}"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def goals(checks: Sequence[Check]) -> str:
    """The goals that were missed, or that all were reached; empty if there are none."""
    missed = [check.goal for check in checks if not check.met]
    if missed:
        return "MISSED: " + "; ".join(missed)
    return "reached" if checks else ""


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(map(str.ljust, cells, widths)).rstrip()
