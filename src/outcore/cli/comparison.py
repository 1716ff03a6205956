"""Two runs side by side: one table for people, one dict for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outcore import __version__
from outcore.cli.training import Run
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.report import Report  # which loads numpy

UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run in-core and one inside a budget.

    `traced` is a third one, by torch's `aot_eager` backend, made where the gradients of the first
    two differ: it runs the same graph as outcore, without a plan. `repeated` is that once more,
    made where they still differ: kernels of a GPU may give other bits each time.
    """

    budget_bytes: int
    in_core: Run
    budgeted: Run
    report: Report
    traced: Run | None = None
    repeated: Run | None = None

    @property
    def reference(self) -> Run:
        """The run whose gradients the budgeted one should have."""
        return self.traced or self.in_core

    @property
    def varying(self) -> int:
        """Iterations in which the reference itself has other gradients when it is repeated."""
        return 0 if self.repeated is None else _unlike(self.reference, self.repeated)

    @property
    def differing(self) -> int:
        """Iterations whose gradients are not, bit for bit, those of the reference.

        Varying ones come last: what varies once has other weights from then on.
        """
        return _unlike(self.reference, self.budgeted, len(self.reference.steps) - self.varying)

    @property
    def inside(self) -> bool:
        """Whether the measured peak is inside the budget."""
        return self.budgeted.peak_bytes <= self.budget_bytes

    @property
    def kept(self) -> bool:
        """Whether both promises were kept: the same gradients, inside the budget."""
        return self.inside and not self.differing


def _unlike(run: Run, other: Run, first: int | None = None) -> int:
    pairs = zip(run.steps, other.steps, strict=True)
    return sum(a.gradients != b.gradients for a, b in islice(pairs, first))


def table(compared: Comparison) -> Table:
    """The figures of both runs, predicted beside measured."""
    in_core, budgeted, report = compared.in_core, compared.budgeted, compared.report
    shown = Table("", "in-core", "budgeted")
    rows = (
        ("budget", "", format_bytes(compared.budget_bytes)),
        (
            "peak memory, predicted",
            _bytes(report.in_core_peak_bytes),
            _bytes(report.predicted_peak_bytes),
        ),
        (
            "peak memory, measured",
            _bytes(in_core.peak_bytes),
            f"{_bytes(budgeted.peak_bytes)}{_times(budgeted.peak_bytes, in_core.peak_bytes)}",
        ),
        ("inside the budget", "", _yes(compared.inside)),
        (
            "time per iteration, predicted",
            _seconds(report.in_core_seconds),
            _seconds(report.predicted_seconds),
        ),
        (
            "time per iteration, measured",
            _seconds(in_core.seconds),
            f"{_seconds(budgeted.seconds)}{_times(budgeted.seconds, in_core.seconds)}",
        ),
        ("loss, first", f"{in_core.steps[0].loss:.6f}", f"{budgeted.steps[0].loss:.6f}"),
        ("loss, last", f"{in_core.steps[-1].loss:.6f}", f"{budgeted.steps[-1].loss:.6f}"),
        ("gradients bitwise equal", "", _verdict(compared)),
        ("policy", "", report.policy),
        ("keep / offload / recompute", "", _counts(report)),
        ("offloaded per iteration", "", _bytes(report.offloaded_bytes)),
        ("recomputed per iteration", "", _seconds(report.recompute_seconds)),
        ("planning", "", _seconds(report.planning_seconds)),
    )
    for row in rows:
        shown.add_row(*row)
    return shown


def to_dict(compared: Comparison) -> dict[str, Any]:
    """All figures, those of every iteration too; bytes and seconds."""
    return {
        "versions": {"outcore": __version__, "torch": version("torch")},
        "budget_bytes": compared.budget_bytes,
        "inside_budget": compared.inside,
        "differing_iterations": compared.differing,
        "varying_iterations": compared.varying,
        "reference": compared.reference.title,
        "in_core": _run(compared.in_core),
        "budgeted": _run(compared.budgeted),
        "report": compared.report.to_dict(),
    }


def _run(run: Run) -> dict[str, Any]:
    return asdict(run) | {"seconds": run.seconds}


def _verdict(compared: Comparison) -> str:
    total = len(compared.budgeted.steps)
    same = total - compared.varying
    if compared.differing:
        return f"no: {compared.differing} of {same} iterations differ"
    if not same:
        return "unknown: PyTorch's own vary"
    if compared.varying:
        return f"yes, in {same} of {total}; then PyTorch's own vary"
    reference = "" if compared.traced is None else " to aot_eager, which is not equal to eager"
    return f"yes{reference} ({total} iterations)"


def _counts(report: Report) -> str:
    counts = report.counts
    return f"{counts.keep} / {counts.offload} / {counts.recompute}"


def _times(figure: float | None, of: float | None) -> str:
    return f", {figure / of:.2f}x" if figure and of else ""


def _yes(fact: bool) -> str:  # noqa: FBT001 - a word for a fact
    return "yes" if fact else "no"


def _bytes(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else format_bytes(nbytes)


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)
