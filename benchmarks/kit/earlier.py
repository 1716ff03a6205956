"""Earlier: the rows that a results file already has, to continue a run that was cut short."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

Saved: TypeAlias = Mapping[str, Any]
"""A row, a part or a machine in the form in which a file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """How the benchmarks of a kit continue."""

    key: Callable[[Saved], Hashable]
    """What distinguishes a row from the others of its benchmark."""
    failed: Callable[[Saved], bool]
    """Whether a row has to be measured again."""
    machine: Callable[[Saved], Hashable]
    """The properties of a machine that must be the same."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a file has of one benchmark, with its rows as they were saved."""

    part: Saved
    resuming: Resuming

    @property
    def known(self) -> dict[Hashable, Saved]:
        """The rows that need not be measured again, by their keys."""
        rows = (row for row in self.part["rows"] if not self.resuming.failed(row))
        return {self.resuming.key(row): row for row in rows}

    @property
    def done(self) -> bool:
        """Whether no row is missing."""
        return self.part["complete"] and len(self.known) == len(self.part["rows"])

    def with_later(self, rows: Iterable[Saved]) -> list[dict[str, Any]]:
        """These rows and later ones. A later row replaces the one with the same key.

        Rows that stay get the date and the source with which they were taken.
        """
        source = self.part["machine"].get("source")
        own = {"date": self.part["date"]} | ({"source": source} if source else {})
        found = {self.resuming.key(row): own | dict(row) for row in self.part["rows"]}
        return list((found | {self.resuming.key(row): dict(row) for row in rows}).values())


def earlier(
    file: Path, name: str, machine: Saved, scale: Any, resuming: Resuming
) -> Earlier | None:
    """What `file` has of benchmark `name`; None if nothing.

    Raises ValueError if it is from another machine or at another scale.
    """
    if not file.exists():
        return None
    part = json.loads(file.read_text(encoding="utf-8"))["benchmarks"].get(name)
    if part is None:
        return None
    if resuming.machine(part["machine"]) != resuming.machine(machine):
        raise ValueError(f"{file} has {name} of another machine: give another --out")
    then, now = part["scale"], json.loads(json.dumps(asdict(scale)))
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if names:
        differ = ", ".join(f"{name}: {then.get(name)}, now {now.get(name)}" for name in names)
        raise ValueError(f"{file} has {name} at another scale ({differ}): give another --out")
    return Earlier(part, resuming)
