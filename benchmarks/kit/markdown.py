"""markdown: print results as Markdown: `python -m benchmarks.kit.markdown FILE [NAME...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import show
from benchmarks.kit.rows import Check


def markdown(found: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """The machine, and a table, of each benchmark in `names`, or of all of them.

    Raises KeyError if the file has no such benchmark.
    """
    parts = {name: found["benchmarks"][name] for name in names or found["benchmarks"]}
    return "\n".join(_section(name, part) for name, part in parts.items())


def _section(name: str, part: Mapping[str, Any]) -> str:
    machine = part["machine"]
    device = machine.get("device") or machine["processor"]
    rest = "" if part["complete"] else " Not complete: no time was left for the other rows."
    where = f"{part['date']}, {device}, torch {machine['versions']['torch']}."
    return f"### {name}: {part['summary']}\n\n{where}{rest}\n\n{table(part['rows'])}\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of one benchmark without empty columns, and the goals that were missed."""
    names = dict.fromkeys(name for row in rows for name in row if name != "checks")
    columns = [name for name in names if show.is_column([row.get(name) for row in rows])]
    lines = [[*map(show.heading, columns), "goals"], ["---"] * (len(columns) + 1)]
    for row in rows:
        checks = [Check(**check) for check in row["checks"]]
        cells = [show.cell(name, row.get(name)) for name in columns]
        lines.append([*cells, show.goals(checks)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2:]))
