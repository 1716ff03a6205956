"""The public names that need torch."""

from __future__ import annotations

from outcore.capture import trace
from outcore.runtime.backend import Backend

__all__ = ["Backend", "trace"]
