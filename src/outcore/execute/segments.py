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

SPLITTING = "max_split_size_mb"
"""The setting that keeps large free blocks whole: they serve no smaller tensor. Expandable segments
make few blocks, which grow as large as the memory, so that it makes most of that useless."""

_AGAINST = (SPLITTING, "max_non_split_rounding_mb")
"""Settings that make sense only without expandable segments."""


def asked(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that torch reads, or would read, and its value."""
    name = next((name for name in VARIABLES if name in environ), VARIABLES[-1])
    return name, environ.get(name, "")


def expands(text: str) -> bool | None:
    """Whether the setting text turns expandable segments on; None if it does not mention them."""
    said = _SWITCH.findall(text)
    return said[-1] == "True" if said else None


def expanding(text: str) -> str:
    """Add expandable segments to the setting text, and remove what only makes sense without."""
    kept = [each for each in _entries(text) if not each.startswith(_AGAINST)]
    return ",".join([*kept, EXPANDABLE])


def not_expanding(text: str) -> str:
    """Add to the setting text that segments do not expand."""
    return ",".join([*_entries(text), EXPANDABLE.replace("True", "False")])


def is_set(key: str, text: str) -> bool:
    """Whether the setting text sets `key`."""
    return any(each.startswith(key) for each in _entries(text))


def _entries(text: str) -> list[str]:
    """The parts between commas. A list of values has commas, so it is in several parts."""
    return [part for each in text.split(",") if (part := each.strip())]
