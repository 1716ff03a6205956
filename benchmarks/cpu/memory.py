"""Memory as the kernel counts it: resident bytes of this process and their high-water mark."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident memory now."""
    return _status("VmRSS")


def high_water_bytes() -> int:
    """The most resident memory since the last reset."""
    return _status("VmHWM")


def mapped_bytes() -> int:
    """The process's address space, whatever is in it."""
    return _status("VmSize")


def reset_high_water() -> None:
    """Let the high-water mark begin anew at what is resident now."""
    _CLEAR.write_text("5")


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024  # the kernel prints kB, which are KiB
    raise KeyError(name)
