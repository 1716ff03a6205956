"""Results: one JSON file; each benchmark that runs replaces its own part of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.kit.benchmark import Benchmark
from benchmarks.kit.rows import Row, values

FORMAT = 1
FOLDER = Path(__file__).parent.parent / "results"


def default_file(kit: str, *, small: bool) -> Path:
    """Where results go if nobody says: named by kit and date, those of `--small` apart."""
    name = "small" if small else time.strftime("%Y-%m-%d", time.gmtime())
    return FOLDER / f"{kit}-{name}.json"


def save(file: Path, name: str, part: dict[str, Any]) -> None:
    """Put `part` in `file` under `name`; other parts stay. The file is never half-written."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"benchmarks": {}}
    found["format"] = FORMAT
    found["benchmarks"][name] = part
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def part(
    benchmark: Benchmark[Any],
    scale: Any,
    machine: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    complete: bool,
) -> dict[str, Any]:
    """What is saved of one benchmark, with `rows` as saved. `complete`: no time was wanting."""
    return {
        "summary": benchmark.summary,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine,
        "scale": asdict(scale),
        "complete": complete,
        "rows": rows,
    }


def saved(row: Row) -> dict[str, Any]:
    """A row as it is saved: what is None is left out."""
    found = {name: value for name, value in values(row).items() if value is not None}
    return found | {"checks": [asdict(check) for check in row.checks]}
