"""report: figures for people and for programs."""

from __future__ import annotations

from outcore.report.report import Counts, Report

__all__ = ["Counts", "Report"]
