"""The command line: `outcore COMMAND`. A file per command in `commands`, and what they share."""

from __future__ import annotations

from outcore.cli.app import app, main

__all__ = ["app", "main"]
