"""page: write docs/reproduction.md: `python -m benchmarks.reproduction.page FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.results import FOLDER
from benchmarks.reproduction.figure import NEAR

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
COLUMNS = {
    "source": "printed in",
    "what": "figure",
    "paper": "paper",
    "ours": "ours (modeled)",
    "difference": "difference",
    "note": "note",
}
INTRODUCTION = (Path(__file__).parent / "introduction.md").read_text(encoding="utf-8")


def write_page(file: Path) -> None:
    """Write the page from a results file; if the file is not in our results folder, next to it."""
    kept = file.resolve().parent == FOLDER.resolve() and not file.stem.endswith("small")
    target = PAGE if kept else file.with_suffix(".md")
    target.write_text(page(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")


def page(found: Mapping[str, Any]) -> str:
    """The page: an introduction, how many figures are reproduced, and a table of each part."""
    parts = found["benchmarks"]
    rows = [row for part in parts.values() for row in part["rows"]]
    met = sum(_met(row) for row in rows)
    torch = next(iter(parts.values()))["machine"]["versions"]["torch"]
    head = INTRODUCTION.format(met=met, total=len(rows), near=f"{NEAR:.0%}", torch=torch)
    return head + "".join(_section(name, part) for name, part in parts.items())


def _section(name: str, part: Mapping[str, Any]) -> str:
    rest = "" if part["complete"] else "Some rows are missing: no time was left.\n\n"
    command = f"`python -m benchmarks.reproduction --only {name}`, {part['date'][:10]}"
    return f"\n## {part['summary']}\n\n{command}\n\n{rest}{_table(part['rows'])}\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for row in rows:
        difference = row["difference"] if _met(row) else f"**miss**: {row['difference']}"
        cells = dict(row) | {"difference": difference}
        lines.append([str(cells.get(name, "")).replace("|", "\\|") for name in COLUMNS])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _met(row: Mapping[str, Any]) -> bool:
    return all(check["met"] for check in row["checks"])


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
