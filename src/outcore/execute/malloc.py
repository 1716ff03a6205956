"""malloc: set up how the C library allocates, because it decides the speed of a CPU training step.

By default glibc maps a large buffer afresh and unmaps it when it is freed, so each buffer costs
page faults again: half as much time again for a step. `M_MMAP_MAX = 0` prevents this for buffers of
any size. With a huge `M_TRIM_THRESHOLD`, the heap keeps what was freed.

The cost is resident memory. Tensors are aligned to 64 bytes. For that, glibc allocates a larger
piece than it returns, and puts the remaining slivers into the calling thread's cache of small
pieces. Small allocations then settle there, between the large ones, so a hole is too small for the
very size that it came from. Measured with glibc 2.36 on a ResNet-50 step that offloads: live
tensors peak at 610 MiB, and the process grows by 1.7 GiB. `M_ARENA_MAX = 1` and `M_MXFAST = 0`
change nothing, and the thread cache can be turned off only before a program starts.

So the arena (`arena.py`) serves tensors if it can be compiled. What is said here applies to the
rest: small tensors, and what libraries allocate themselves. If there is no arena, `ResidentLimit`
returns memory to the system whenever resident memory exceeds a limit. Memory that is used again
after that costs page faults: a fifth of the step's time in the same measurement.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4
_SETTINGS: Final = (
    ("M_MMAP_MAX", _M_MMAP_MAX, 0),
    ("M_TRIM_THRESHOLD", _M_TRIM_THRESHOLD, 2**31 - 1),
    ("M_TOP_PAD", _M_TOP_PAD, 64 << 20),
)
"""Name, mallopt's number and value of each setting to make."""
_TUNABLES: Final = ("mmap_max", "mmap_threshold", "top_pad", "trim_threshold")
"""The names in `GLIBC_TUNABLES` that set up malloc, without `glibc.malloc.`."""
_VARIABLES: Final = frozenset(
    {
        "MALLOC_ARENA_MAX",
        "MALLOC_ARENA_TEST",
        "MALLOC_MMAP_MAX_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "MALLOC_TRIM_THRESHOLD_",
    }
)
"""The environment variables that glibc reads at startup (mallopt(3))."""


@dataclass(frozen=True, slots=True)
class MallocReport:
    """Whether outcore set up malloc, why or why not, and the settings that it made."""

    owned: bool
    reason: str
    settings: tuple[tuple[str, int], ...] = ()


@cache
def own_malloc() -> MallocReport:
    """Keep glibc from mapping and unmapping large buffers, once for the whole process.

    Does nothing if malloc is not glibc's, or if the user has set it up: by `MALLOC_*` or the
    equivalent in `GLIBC_TUNABLES`, or by preloading another malloc.
    """
    library = _glibc()
    if library is None:
        return MallocReport(owned=False, reason="the C library is not glibc")
    theirs = set_up_by_user(os.environ)
    if theirs is not None:
        return MallocReport(owned=False, reason=f"{theirs} is set in the environment")
    made = tuple((name, value) for name, key, value in _SETTINGS if library.mallopt(key, value))
    return MallocReport(owned=True, reason="the C library is glibc", settings=made)


def set_up_by_user(environment: Mapping[str, str]) -> str | None:
    """The environment variable with which the user has set up malloc, or None."""
    for name, value in environment.items():
        tuned = name == "GLIBC_TUNABLES" and any(f"glibc.malloc.{t}=" in value for t in _TUNABLES)
        replaced = name == "LD_PRELOAD" and "malloc" in value
        if tuned or replaced or name in _VARIABLES:
            return name
    return None


def trim() -> bool:
    """Return every whole free page to the system. False if malloc cannot, or if there is none."""
    library = _glibc()
    return library is not None and bool(library.malloc_trim(0))


def resident_bytes() -> int:
    """Resident memory of this process. Raises OSError if there is no /proc."""
    return _resident_bytes(Path("/proc/self/statm").read_bytes())


class ResidentLimit:
    """Trims when resident memory exceeds `limit_bytes`. A check is cheap enough for each copy.

    If trimming does not help because the memory is in use, it is tried again only after resident
    memory has grown by a thirty-second of the limit. Raises OSError if there is no /proc.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.trims = 0
        """How often memory was trimmed."""
        self._threshold_bytes = limit_bytes
        """Trim above this; at least the limit."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._statm)
        """Closes the file that resident memory is read from. May be called more than once."""
        _prepare_huge_pages(limit_bytes)

    def check(self) -> None:
        """Trim if resident memory exceeds the threshold."""
        if self._resident_bytes() > self._threshold_bytes:
            self.trims += 1
            trim()
            _prepare_huge_pages(self.limit_bytes)
            left = self._resident_bytes() + self.limit_bytes // 32
            self._threshold_bytes = max(self.limit_bytes, left)

    def _resident_bytes(self) -> int:
        return _resident_bytes(os.pread(self._statm, 64, 0))


def _prepare_huge_pages(nbytes: int) -> None:
    """Extend the heap by `nbytes` of addresses that huge pages will fill, if the system allows it.

    Trimming also cuts off the end of the heap, so this must be repeated after each trim.
    """
    library = _glibc()
    if library is None or not own_malloc().owned or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = library.malloc(nbytes)
    if start is None:
        return
    aligned = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + nbytes - aligned) // mmap.PAGESIZE * mmap.PAGESIZE
    library.madvise(aligned, length, mmap.MADV_HUGEPAGE)
    library.free(start)


def _resident_bytes(statm: bytes) -> int:
    """Resident memory by the content of `/proc/self/statm`."""
    return int(statm.split(None, 2)[1]) * mmap.PAGESIZE


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it
    except (AttributeError, OSError, TypeError):
        return None
    library.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
