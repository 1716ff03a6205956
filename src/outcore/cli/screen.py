"""screen: where tables are shown."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 120
"""Columns of a file or a pipe, which has no width of its own."""


NARROW = 40
"""Fewer columns are not believed: some terminals and containers say 0."""


def screen() -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; else wide enough for tables."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) >= NARROW:
        return Console(width=int(told))
    return Console(width=None if sys.stdout.isatty() and not told else WIDE)
