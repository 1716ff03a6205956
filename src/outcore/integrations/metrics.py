"""metrics: the figures of a Report that belong into a training log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module needs none of it to run
    from outcore.report import Report

PREFIX = "outcore/"


def metrics(report: Report) -> dict[str, float]:
    """By name: peak, stalls and offloaded bytes of a step, and all that went to the disk so far.

    `outcore/peak_bytes` is measured once a planned step was metered, and predicted until then;
    `outcore/stall_seconds` and `outcore/offloaded_bytes` are those of the plan, for each step. They
    are left out while nothing is planned. `outcore/disk_bytes_written` is measured, from the start.
    """
    found: dict[str, float] = {}
    peak = report.measured_peak_bytes or report.predicted_peak_bytes
    if peak is not None:
        found = {
            "peak_bytes": peak,
            "stall_seconds": report.stall_seconds,
            "offloaded_bytes": report.offloaded_bytes,
        }
    found["disk_bytes_written"] = report.disk_bytes_written
    return {PREFIX + name: value for name, value in found.items()}
