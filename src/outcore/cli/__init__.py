"""The command line: `outcore demo`, `doctor`, `policies`, `networks`. One file per command."""

from __future__ import annotations

from outcore.cli.app import app, main

__all__ = ["app", "main"]
