"""report: show what outcore did with a budget, as figures, HTML pages and files for viewers."""

from __future__ import annotations

from outcore.report.counts import Counts, count_choices, count_held
from outcore.report.figures import Report
from outcore.report.gather import report, with_steps
from outcore.report.links import LinkUse
from outcore.report.planned import PlannedStep
from outcore.report.recorded import Recorded

__all__ = [
    "Counts",
    "LinkUse",
    "PlannedStep",
    "Recorded",
    "Report",
    "count_choices",
    "count_held",
    "report",
    "with_steps",
]
