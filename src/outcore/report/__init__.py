"""report: figures for people and for programs."""

from __future__ import annotations

from outcore.report.counts import Counts, count_choices
from outcore.report.report import Report

__all__ = ["Counts", "Report", "count_choices"]
