"""screen: where tables are shown."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 120
"""Columns of a file or a pipe, which has no width of its own."""


def screen() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; else wide enough for tables."""
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if told else WIDE)
