"""patterns: the trace of a symbolic graph for further sizes, from the one for some sizes."""

from __future__ import annotations

from outcore.capture.patterns.draw import pattern_of
from outcore.capture.patterns.pattern import Pattern

__all__ = ["Pattern", "pattern_of"]
