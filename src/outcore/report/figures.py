"""Report: what outcore did with a budget, in predicted and measured figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from outcore.report.counts import Counts
from outcore.report.links import LinkUse
from outcore.report.planned import PlannedStep, Swept
from outcore.report.recorded import Recorded
from outcore.units import format_bytes, format_seconds

File: TypeAlias = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one budget, in bytes and seconds. A figure is None while it is not known.

    Sums are over all calls of a step to its `graphs`. Where graphs of the same ops take turns, for
    example for batches of several sizes, they are averages over the latest steps. Peaks are the
    highest over all graphs, `others` included.

    `steps` and `sweep` are what the pages are drawn from. They are not compared, not printed, and
    not part of `to_dict`.
    """

    policy: str
    """The spec of the policy."""
    state: str
    """`planned`; `in-core` if everything fits and is kept; `profiling` before there is a plan;
    `unplanned` if there will be none (`notes` say why) or nothing was called yet."""
    budget_bytes: int
    """The device budget; 0 while it is a fraction of a device that is not known yet."""
    graphs: int = 0
    """How many graphs the figures cover."""
    others: int = 0
    """How many further graphs run in few of the steps, for example that of a smaller last batch."""
    resident_bytes: int | None = None
    """What is held through the whole step and cannot be moved: parameters, inputs and the like."""
    in_core_peak_bytes: int | None = None
    """Predicted peak with everything kept, with what the process has come to hold since."""
    predicted_peak_bytes: int | None = None
    """Predicted peak under the plan, with what the process has come to hold since."""
    measured_peak_bytes: int | None = None
    """Highest peak of a step, from the allocator's counters."""
    predicted_seconds: float | None = None
    """Predicted time of a step under the plan."""
    measured_seconds: float | None = None
    """Measured time of a step under the plan; None until each graph has run under its plan."""
    in_core_seconds: float | None = None
    """Predicted time of a step with everything kept, from the profile."""
    lower_bound_seconds: float | None = None
    """The time that no plan can beat under this budget; None unless it was requested."""
    planning_seconds: float | None = None
    """How long planning took; None if it was not timed."""
    capture_seconds: float | None = None
    """How long capturing the graphs took."""
    counts: Counts = field(default_factory=Counts)
    """Choices for the gaps that cross from forward to backward."""
    held: int = 0
    """Buffers that no op needs any more, held for recomputations."""
    offloaded_bytes: int = 0
    """Bytes that the plan copies out in one step."""
    disk_bytes_written: int = 0
    """Measured since the start, including profiled steps and the measurement of the disk."""
    recompute_seconds: float = 0.0
    """Predicted time that one step spends on recomputation."""
    stall_seconds: float = 0.0
    """Predicted time that compute waits for copies in one step."""
    links: tuple[LinkUse, ...] = ()
    """Each direction that copies use, with its rates."""
    recorded: Recorded | None = None
    """Where the time of a recorded step went (`Backend.record_step`); None if none was recorded."""
    replans: int = 0
    """How many graphs were planned again because their time drifted."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader, one sentence or more each."""
    title: str = ""
    """What is trained; empty if not known."""
    steps: tuple[PlannedStep, ...] = field(default=(), repr=False, compare=False)
    """The graphs that the figures come from."""
    sweep: Swept | None = field(default=None, repr=False, compare=False)
    """What other budgets would take; None unless it was requested (one graph only)."""

    @property
    def several_graphs(self) -> bool:
        """Whether several graphs run. If so, the measured peak is not the peak of any one graph."""
        return max(self.graphs + self.others, len(self.steps)) > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name: `counts` and `recorded` are dicts, links and notes lists."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return values | {
            "counts": asdict(self.counts),
            "links": [asdict(link) for link in self.links],
            "recorded": None if self.recorded is None else asdict(self.recorded),
            "notes": list(self.notes),
        }

    def to_html(self, path: File) -> None:
        """Write the HTML page, complete in one file (docs/report.md).

        This explains the moves that free most, which takes from milliseconds to seconds.
        """
        from outcore.report.page import page  # noqa: PLC0415 - loads jinja2

        Path(path).write_bytes(page(self).encode(errors="backslashreplace"))

    def to_chrome_trace(self, path: File) -> None:
        """Write the timelines as JSON for Perfetto and chrome://tracing."""
        from outcore.report.chrome import chrome_trace_text  # noqa: PLC0415 - reads this module

        Path(path).write_text(chrome_trace_text(self), encoding="utf-8")

    def to_memory_snapshot(self, path: File) -> None:
        """Write the predicted device memory for PyTorch's viewer, pytorch.org/memory_viz."""
        from outcore.report.snapshot import memory_snapshot_file  # noqa: PLC0415 - reads this module

        Path(path).write_bytes(memory_snapshot_file(self))

    def to_plot(self, path: File) -> None:
        """Draw timeline and memory into a .png, .pdf or .svg file, with matplotlib.

        Raises OptionValueError if the file is of another kind or cannot be written, or if nothing
        is planned; MissingPackageError if matplotlib is not installed.
        """
        from outcore.report.drawing import draw  # noqa: PLC0415 - matplotlib is an extra

        draw(self, Path(path))

    def __str__(self) -> str:
        """A table for people: one row for each figure that is known."""
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
        if self.recorded is not None:
            yield "recorded step", str(self.recorded)
        yield from (("note", note) for note in self.notes)


def _words(name: str, unit: str) -> str:
    kind = "" if unit == "_bytes" else " time"
    return name.removesuffix(unit).replace("_", " ") + kind
