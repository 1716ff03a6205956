"""results: save results in one JSON file, in which each benchmark replaces its own part."""

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
    """The default file, named by kit and date; with `small`, a separate file."""
    name = "small" if small else time.strftime("%Y-%m-%d", time.gmtime())
    return FOLDER / f"{kit}-{name}.json"


def save(file: Path, name: str, part: dict[str, Any]) -> None:
    """Put `part` in `file` under `name`, and keep other parts. The file is never half-written."""
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
    """What is saved of one benchmark. `rows` are as saved; `complete`: none was left out."""
    return {
        "summary": benchmark.summary,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine,
        "scale": asdict(scale),
        "complete": complete,
        "rows": rows,
    }


def saved(row: Row) -> dict[str, Any]:
    """A row in the form in which it is saved, without fields that are None."""
    found = {name: value for name, value in values(row).items() if value is not None}
    return found | {"checks": [asdict(check) for check in row.checks]}
