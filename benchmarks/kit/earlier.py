"""Earlier: what a file has of a benchmark already, where a run goes on that was cut short."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Saved: TypeAlias = Mapping[str, Any]
"""A row, a part or a machine as a file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """How the benchmarks of a kit go on."""

    key: Callable[[Saved], Hashable]
    """What tells a row from the others of its benchmark; None: it is to be measured again."""
    machine: Callable[[Saved], Hashable]
    """What of a machine must be the same."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Rows as they were saved, by their keys, with the dates of their own."""

    rows: Mapping[Hashable, Saved]
    complete: bool
    date: str

    def with_later(
        self, rows: Sequence[Saved], key: Callable[[Saved], Hashable]
    ) -> list[dict[str, Any]]:
        """These rows and later ones, which take the place of those of the same key."""
        later = {key(row): dict(row) for row in rows if key(row) is not None}
        failed = [dict(row) for row in rows if key(row) is None]
        kept = {k: {"date": self.date, **row} for k, row in self.rows.items()}
        return [*(kept | later).values(), *failed]


def earlier(file: Path, name: str, machine: Saved, resuming: Resuming) -> Earlier | None:
    """What `file` has of benchmark `name`, taken on such a machine; None where that is nothing."""
    if not file.exists():
        return None
    part = json.loads(file.read_text(encoding="utf-8"))["benchmarks"].get(name)
    if part is None or resuming.machine(part["machine"]) != resuming.machine(machine):
        return None
    rows = {resuming.key(row): row for row in part["rows"]}
    rows.pop(None, None)
    return Earlier(rows, part["complete"], part["date"])
