"""explain: show why a plan moves each tensor, and where its step waits."""

from __future__ import annotations

from outcore.explain.account import explain
from outcore.explain.explanation import (
    Alternative,
    Explanation,
    Late,
    Move,
    Rerun,
    Total,
    Wait,
    WaitsFor,
)
from outcore.explain.text import summary

__all__ = [
    "Alternative",
    "Explanation",
    "Late",
    "Move",
    "Rerun",
    "Total",
    "Wait",
    "WaitsFor",
    "explain",
    "summary",
]
