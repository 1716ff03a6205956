"""segments: read and extend the environment's settings for torch's allocator of GPU memory.

Without expandable segments, holes between tensors stay, and a block may be a megabyte larger than
its tensor. With sizes rounded up to parts of powers of two, a block may be half as large again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch reads the first of these that is set, even if it is empty, and none of the others."""

EXPANDABLE = "expandable_segments:True"
"""The setting that turns on expandable segments."""

_SWITCH = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(\w+)")
"""Anchored, because other keys begin with the same words."""

ROUNDING = "roundup_power2_divisions"
"""The setting that rounds sizes up to parts of powers of two."""


def asked(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that torch reads, or would read, and its value."""
    name = next((name for name in VARIABLES if name in environ), VARIABLES[-1])
    return name, environ.get(name, "")


def expands(text: str) -> bool | None:
    """Whether the setting text turns expandable segments on; None if it does not mention them."""
    said = _SWITCH.findall(text)
    return said[-1] == "True" if said else None


def expanding(text: str) -> str:
    """Add expandable segments to the setting text."""
    kept = text.rstrip(" ,")
    return f"{kept},{EXPANDABLE}" if kept else EXPANDABLE


def rounds_up(text: str) -> bool:
    """Whether the setting text rounds sizes up to parts of powers of two."""
    return any(each.strip().startswith(ROUNDING) for each in text.split(","))
