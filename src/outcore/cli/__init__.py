"""cli: the command line `outcore COMMAND`. Each command has a file in `commands`."""

from __future__ import annotations

from outcore.cli.app import app, main

__all__ = ["app", "main"]
