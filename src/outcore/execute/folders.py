"""folders: choose the default folder for offloaded bytes: one on a disk, not in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Lists the file systems that this process sees (Linux)."""

IN_MEMORY = frozenset({b"tmpfs", b"ramfs"})
"""File systems that store files in memory."""

ELSEWHERE = Path("/var/tmp")  # noqa: S108 - files in it have no names, and belong to the user alone
"""Also for temporary files. Unlike the first choice it survives a restart, so it is on a disk."""


def spill_folder() -> Path:
    """Return the system's temporary folder, or `/var/tmp` if only the former is in memory."""
    folder = Path(tempfile.gettempdir())
    usable = os.access(ELSEWHERE, os.W_OK | os.X_OK) and not in_memory(ELSEWHERE)
    return ELSEWHERE if in_memory(folder) and usable else folder


def in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether files in `folder` take memory; False if the system does not say."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - may be given as text
        lines = MOUNTS.read_bytes().splitlines()  # paths may have any encoding, or none
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    return any(_kind(line) in IN_MEMORY for line in lines if line.split()[2:3] == [number])


def _kind(line: bytes) -> bytes:
    """The type of the file system: the word after the lone hyphen.

    The fields before the hyphen are optional.
    """
    return line.partition(b" - ")[2].partition(b" ")[0]
