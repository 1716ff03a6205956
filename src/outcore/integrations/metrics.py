"""metrics: select the figures of a Report for a training log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not needed at run time
    from outcore.report import Report

PREFIX = "outcore/"


def metrics(report: Report) -> dict[str, float]:
    """Peak, stalls and offloaded bytes of a step, and the bytes written to disk so far, by name.

    `outcore/peak_bytes` is predicted until a planned step has been metered, and measured from then
    on. `outcore/stall_seconds` and `outcore/offloaded_bytes` are the plan's, per step. These three
    are left out while nothing is planned. `outcore/disk_bytes_written` is measured since the start.
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
