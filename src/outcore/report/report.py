"""Report: what outcore did with a budget, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from outcore.report.counts import Counts
from outcore.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Report:
    """One budget's account. Bytes and seconds; None where nothing is known yet.

    Everything is summed over the graphs of the step, but peaks, which are the step's.
    `in_core_seconds` and `in_core_peak_bytes` are what the step would take with everything kept,
    from the profile; `lower_bound_seconds`, what no plan can beat under the budget, is there where
    it was asked for. `replans` counts graphs that were planned again because their time drifted.
    """

    policy: str
    state: str
    budget_bytes: int
    graphs: int = 0
    resident_bytes: int | None = None
    in_core_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    in_core_seconds: float | None = None
    lower_bound_seconds: float | None = None
    planning_seconds: float | None = None
    capture_seconds: float | None = None
    counts: Counts = field(default_factory=Counts)
    offloaded_bytes: int = 0
    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    replans: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; `counts` as a dict, `notes` as a list."""
        return asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        """A table for people: one row per figure that is known."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "policy", self.policy
        yield "state", self.state
        for name, value in asdict(self).items():
            if name.endswith("_bytes") and value is not None:
                yield _words(name, "_bytes"), format_bytes(value)
            elif name.endswith("_seconds") and value is not None:
                yield _words(name, "_seconds"), format_seconds(value)
        counts = self.counts
        yield (
            "keep / offload / recompute",
            f"{counts.keep} / {counts.offload} / {counts.recompute}",
        )
        yield from (("note", note) for note in self.notes)


def _words(name: str, unit: str) -> str:
    kind = "" if unit == "_bytes" else " time"
    return name.removesuffix(unit).replace("_", " ") + kind
