"""Where offloaded bytes lie if nobody says so: in a folder on a disk, not in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""What Linux says of the file systems that this process sees."""

IN_MEMORY = frozenset({b"tmpfs", b"ramfs"})

ELSEWHERE = Path("/var/tmp")  # noqa: S108 - files in it have no names, and are the user's alone
"""For temporary files too; unlike the first choice, it outlives a restart, so it is on a disk."""


def spill_folder() -> Path:
    """The system's temporary folder, or `/var/tmp` where that is in memory and this is not."""
    folder = Path(tempfile.gettempdir())
    usable = os.access(ELSEWHERE, os.W_OK | os.X_OK) and not in_memory(ELSEWHERE)
    return ELSEWHERE if in_memory(folder) and usable else folder


def in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether what is written to a folder takes memory; False where the system does not tell."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - may be given as text
        lines = MOUNTS.read_bytes().splitlines()  # paths are in any encoding, or none
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    return any(_kind(line) in IN_MEMORY for line in lines if line.split()[2:3] == [number])


def _kind(line: bytes) -> bytes:
    """The file system's kind: the word after the lone hyphen, before which fields are optional."""
    return line.partition(b" - ")[2].partition(b" ")[0]
