"""The public names that need torch."""

from __future__ import annotations

from outcore.runtime.backend import Backend

__all__ = ["Backend"]
