"""links: the rows of the table of links and their speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outcore.report.figures import Report
from outcore.report.links import LinkUse
from outcore.units import format_bytes, format_rate


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One direction of a link. `busy` is the fraction of the predicted step in which it copies."""

    name: str
    copies: int
    size: str
    busy: str
    rate: str
    measured: str


def link_rows(report: Report) -> Iterator[LinkRow]:
    """A row for each direction that copies use."""
    seconds = report.predicted_seconds
    for link in report.links:
        busy = f"{link.busy_seconds / seconds:.0%} of the step" if seconds else "-"
        size, rate = format_bytes(link.nbytes), format_rate(link.rate)
        yield LinkRow(link.name, link.copies, size, busy, rate, _measured(link))


def _measured(link: LinkUse) -> str:
    if link.measured_rate is None:
        return "-"
    return f"{format_rate(link.measured_rate)} ({link.measured_rate / link.rate:.0%})"
