"""Report: what outcore did with a budget, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from outcore.report.counts import Counts
from outcore.report.links import LinkUse
from outcore.report.planned import PlannedStep, Swept
from outcore.units import format_bytes, format_seconds

File: TypeAlias = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Report:
    """One budget's account. Bytes and seconds; None where nothing is known yet.

    Everything is summed over the calls of the step's `graphs`, but peaks, which are those of all:
    of `others` too, which run in few of the steps, as those of a last batch of another size do.
    Where graphs of the same ops take turns, as for batches of several sizes, the sums are averages
    over the latest steps.
    `in_core_seconds` and `in_core_peak_bytes` are what the step would take with everything kept,
    from the profile; `lower_bound_seconds`, what no plan can beat under the budget, is there where
    it was asked for. `budget_bytes` is 0 while it is a part of a device that is not known yet.
    `replans` counts graphs that were planned again because their time drifted.
    `held`: buffers that no op needs any more, held for recomputations.
    `offloaded_bytes` are planned, for a step. `disk_bytes_written` are measured, from the start:
    profiled steps count too, and what was written to measure the disk.
    `links`: each direction that copies go over, with its rates.

    `steps` are what the figures were drawn from, a graph each; the pages are made of them. `sweep`:
    what other budgets would take, where that was asked for (one graph only). Neither is compared,
    printed, or part of `to_dict`.
    """

    policy: str
    state: str
    budget_bytes: int
    graphs: int = 0
    others: int = 0
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
    held: int = 0
    offloaded_bytes: int = 0
    disk_bytes_written: int = 0
    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    links: tuple[LinkUse, ...] = ()
    replans: int = 0
    notes: tuple[str, ...] = ()
    title: str = ""
    steps: tuple[PlannedStep, ...] = field(default=(), repr=False, compare=False)
    sweep: Swept | None = field(default=None, repr=False, compare=False)

    @property
    def several_graphs(self) -> bool:
        """Whether several graphs run: the measured peak is then that of none alone."""
        return max(self.graphs + self.others, len(self.steps)) > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; `counts` as a dict, `links` and `notes` as lists."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        links = [asdict(link) for link in self.links]
        return values | {"counts": asdict(self.counts), "links": links, "notes": list(self.notes)}

    def to_html(self, path: File) -> None:
        """Write a page to look at, complete in one file (docs/report.md).

        Explains the moves that free most, which takes from milliseconds to seconds.
        """
        from outcore.report.page import page  # noqa: PLC0415 - loads jinja2

        Path(path).write_text(page(self), encoding="utf-8")

    def to_chrome_trace(self, path: File) -> None:
        """Write the timelines as JSON for Perfetto and chrome://tracing."""
        from outcore.report.chrome import chrome_trace_text  # noqa: PLC0415 - reads this module

        Path(path).write_text(chrome_trace_text(self), encoding="utf-8")

    def to_memory_snapshot(self, path: File) -> None:
        """Write the predicted device memory for PyTorch's viewer, pytorch.org/memory_viz."""
        from outcore.report.snapshot import memory_snapshot_file  # noqa: PLC0415 - reads this module

        Path(path).write_bytes(memory_snapshot_file(self))

    def to_plot(self, path: File) -> None:
        """Draw timeline and memory into a .png, .pdf or .svg file, by matplotlib.

        Raises OptionValueError for a file of another kind, one that cannot be written, or where
        nothing is planned; MissingPackageError where matplotlib is not installed.
        """
        from outcore.report.drawing import draw  # noqa: PLC0415 - matplotlib is an extra

        draw(self, Path(path))

    def __str__(self) -> str:
        """A table for people: one row per figure that is known."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.title:
            yield "step", self.title
        yield "policy", self.policy
        yield "state", self.state
        for name, value in self.to_dict().items():
            if name == "budget_bytes" and not value:
                yield "budget", "not known yet"
            elif name.endswith("_bytes") and value is not None:
                yield _words(name, "_bytes"), format_bytes(value)
            elif name.endswith("_seconds") and value is not None:
                yield _words(name, "_seconds"), format_seconds(value)
        if self.disk_bytes_written:
            yield "written to disk so far", format_bytes(self.disk_bytes_written)
        counts = self.counts
        yield (
            "keep / offload / recompute",
            f"{counts.keep} / {counts.offload} / {counts.recompute}",
        )
        if self.held:
            yield "held for reruns", str(self.held)
        yield from ((f"copies {link.name}", str(link)) for link in self.links)
        yield from (("note", note) for note in self.notes)


def _words(name: str, unit: str) -> str:
    kind = "" if unit == "_bytes" else " time"
    return name.removesuffix(unit).replace("_", " ") + kind
