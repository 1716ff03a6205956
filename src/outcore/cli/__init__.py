"""The command line: `outcore COMMAND`. One file per command, and what several share."""

from __future__ import annotations

from outcore.cli.app import app, main

__all__ = ["app", "main"]
