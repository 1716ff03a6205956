"""memory: read this process's memory as the kernel counts it, and its high-water mark."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident bytes now."""
    return _status("VmRSS")


def high_water_bytes() -> int:
    """The most resident bytes since the last reset."""
    return _status("VmHWM")


def mapped_bytes() -> int:
    """Bytes of the process's address space, used or not."""
    return _status("VmSize")


def reset_high_water() -> None:
    """Reset the high-water mark to what is resident now."""
    _CLEAR.write_text("5")


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024  # the kernel prints kB, which are KiB
    raise KeyError(name)
