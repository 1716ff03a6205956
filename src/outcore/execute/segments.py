"""segments: what torch's allocator of GPU memory is asked for in the environment.

Unless segments grow, holes between tensors stay, and a block may be a megabyte larger than its
tensor; with sizes rounded up to parts of powers of two it may be half as large again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Torch reads the first that is set, be it empty, and none of the others."""

EXPANDABLE = "expandable_segments:True"

_SWITCH = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(\w+)")
"""Other keys begin with the same words."""

ROUNDING = "roundup_power2_divisions"


def asked(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that torch reads, or would read, and what it says."""
    name = next((name for name in VARIABLES if name in environ), VARIABLES[-1])
    return name, environ.get(name, "")


def expands(text: str) -> bool | None:
    """What such a text says of it; None: nothing."""
    said = _SWITCH.findall(text)
    return said[-1] == "True" if said else None


def expanding(text: str) -> str:
    """The same text, asking for it too."""
    kept = text.rstrip(" ,")
    return f"{kept},{EXPANDABLE}" if kept else EXPANDABLE


def rounds_up(text: str) -> bool:
    """Whether such a text has sizes rounded up to parts of powers of two."""
    return any(each.strip().startswith(ROUNDING) for each in text.split(","))
