"""comparison: show two runs side by side, as a table for people or a dict for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outcore import __version__
from outcore.cli.training import TrainingRun
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.report import Report  # loads numpy

UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """An in-core run and a run inside a budget.

    If their gradients differ, `traced` is a third run by torch's `aot_eager` backend: it runs the
    same graph as outcore, without a plan. If gradients still differ, `repeated` is that run once
    more: kernels of a GPU may give different bits each time.
    """

    budget_bytes: int
    in_core: TrainingRun
    budgeted: TrainingRun
    report: Report
    traced: TrainingRun | None = None
    repeated: TrainingRun | None = None

    @property
    def reference(self) -> TrainingRun:
        """The run whose gradients the budgeted run should reproduce."""
        return self.traced or self.in_core

    @property
    def varying(self) -> int:
        """How many iterations give different gradients when the reference is repeated."""
        return 0 if self.repeated is None else _unlike(self.reference, self.repeated)

    @property
    def differing(self) -> int:
        """How many iterations have gradients that are not bitwise equal to the reference's.

        Varying iterations are not counted. They are the last ones, because the weights differ from
        the first varying iteration on.
        """
        return _unlike(self.reference, self.budgeted, len(self.reference.steps) - self.varying)

    @property
    def inside(self) -> bool:
        """Whether the measured peak is inside the budget."""
        return self.budgeted.peak_bytes <= self.budget_bytes

    @property
    def kept(self) -> bool:
        """Whether both promises are kept: equal gradients, and a peak inside the budget."""
        return self.inside and not self.differing


def _unlike(run: TrainingRun, other: TrainingRun, first: int | None = None) -> int:
    pairs = zip(run.steps, other.steps, strict=True)
    return sum(a.gradients != b.gradients for a, b in islice(pairs, first))


def table(compared: RunComparison) -> Table:
    """The predicted and measured figures of both runs."""
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


def to_dict(compared: RunComparison) -> dict[str, Any]:
    """All figures, including each iteration's, in bytes and seconds."""
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


def _run(run: TrainingRun) -> dict[str, Any]:
    return asdict(run) | {"seconds": run.seconds}


def _verdict(compared: RunComparison) -> str:
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


def _yes(fact: bool) -> str:  # noqa: FBT001 - it only turns the flag into a word
    return "yes" if fact else "no"


def _bytes(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else format_bytes(nbytes)


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)
