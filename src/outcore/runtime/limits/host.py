"""host: how much host memory this process may use, and how many processes share the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from outcore import cgroups

MEMINFO = Path("/proc/meminfo")

LIMIT = "memory.max", "memory.limit_in_bytes"
"""File of a cgroup with its memory limit: in version 2, in version 1."""
USED = "memory.current", "memory.usage_in_bytes"
"""The same for the memory in use."""
CACHED = "inactive_file", "total_inactive_file"
"""Keys in `memory.stat` for cached files that can be dropped: in version 2, in version 1."""


def memory_limit_bytes() -> int:
    """Bytes of RAM that this process may hold: the machine's total, or a cgroup's limit if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_read(folder, LIMIT) for folder in cgroups.folders("memory"))
    return min((total, *(limit for limit in limits if limit is not None)))


def available_bytes() -> int:
    """Bytes of RAM still available: on the machine, or within a cgroup's limit if less."""
    left = [_left(folder) for folder in cgroups.folders("memory")]
    return max(0, min((_machine_bytes(), *(n for n in left if n is not None))))


def local_processes() -> int:
    """How many processes of one job share this machine, this one included.

    From LOCAL_WORLD_SIZE, which torchrun and similar launchers set; 1 if it is not set.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def _machine_bytes() -> int:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) << 10 if found else memory_limit_bytes()


def _left(folder: Path) -> int | None:
    """Bytes that the cgroup's limit leaves; None: no limit. Inactive cached files count as free."""
    limit, used = _read(folder, LIMIT), _read(folder, USED)
    if limit is None or used is None:
        return limit
    lines = (cgroups.text(folder, "memory.stat") or "").splitlines()
    cached = [int(n) for key, n in (line.split() for line in lines) if key in CACHED]
    return limit - used + max(cached, default=0)


def _read(folder: Path, names: Iterable[str]) -> int | None:
    """The number in the first of the files that exists; None: it has no number, or none exists."""
    texts = (cgroups.text(folder, name) for name in names)
    text = next((text for text in texts if text is not None), "")
    return int(text) if text.isdigit() else None
