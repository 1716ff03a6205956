"""screen: make the console that shows tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 120
"""Columns used for a file or a pipe, which has no width."""


NARROW = 40
"""A smaller COLUMNS is ignored: some terminals and containers set it to 0."""


def screen() -> Console:
    """Standard output, as wide as COLUMNS or the terminal; else `WIDE`, enough for tables."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) >= NARROW:
        return Console(width=int(told))
    return Console(width=None if sys.stdout.isatty() and not told else WIDE)
