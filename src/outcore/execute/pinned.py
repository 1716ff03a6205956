"""pinned: host memory that a GPU copies to and from at full speed, while it computes.

This is ordinary memory, registered with the driver. torch's own pinned allocator rounds sizes up to
powers of two: for one room that holds a whole step's data, that can be twice as much. The pages are
placed on the GPU's memory node if the system says which one that is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch

from outcore.cores import usable_cores
from outcore.errors import HostMemoryError
from outcore.units import format_bytes

_SYSTEM = Path("/sys")
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Without this flag, Linux may refuse a map as large as most of the memory. (Python has it from
3.13.)"""
_TOUCHERS = 16
"""The most threads that fault in pages. Registering would do it too, one page after the other."""


class _Map(mmap.mmap):
    """An anonymous memory map that is unregistered before the system gets it back.

    A forked process does not inherit the memory.
    """

    process: int | None = None
    """The process that made the map; None: the system had no such memory."""
    registered: tuple[int, torch.device] | None = None
    """Address and device, if it is registered."""

    def __new__(cls, nbytes: int) -> Self:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        made = super().__new__(cls, -1, max(1, nbytes), flags=flags)
        # DONTFORK: a fork would copy the pages that are written later.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    made.madvise(getattr(mmap, advice))
        made.process = os.getpid()
        return made

    # Weak references to a map, or with NumPy 2.5 to an array, report its end only after the memory
    # is gone.
    def __del__(self) -> None:
        if self.process not in (None, os.getpid()):
            # Freeing the map here would unmap whatever lies at its address now: keep the map alive
            # forever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        elif self.registered is not None and not sys.is_finalizing():
            _release(*self.registered)


_maps: WeakValueDictionary[int, _Map] = WeakValueDictionary()
"""Live maps by their addresses."""


def pinned(
    nbytes: int, device: torch.device, refused: Callable[[str], None] = warnings.warn
) -> torch.Tensor:
    """Allocate flat bytes of host memory, registered for `device` until the last reference is gone.

    If registering is refused, the memory is ordinary, and `refused` is called with a message.
    Copies are then slower, and the host waits for them. Raises HostMemoryError if the system has
    too little memory.
    """
    try:
        memory = _Map(nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(reason=str(error), needed_bytes=nbytes) from error
    array = np.frombuffer(memory, np.uint8)
    _maps[array.ctypes.data] = memory
    with torch.cuda.device(device), near(device):
        touch(array)
        _lock(memory, array, device, refused)
    return torch.from_numpy(array)[:nbytes]


def shrink(
    memory: torch.Tensor,
    nbytes: int,
    device: torch.device,
    refused: Callable[[str], None] = warnings.warn,
) -> torch.Tensor:
    """Return the first `nbytes` of what `pinned` returned; the system gets the other pages back.

    Returns all of it if the system does not take the pages. Nothing else may use that memory, and
    no copy may be in progress. `refused` is as for `pinned`.
    """
    whole = _maps[memory.data_ptr()]
    registered = whole.registered
    if registered is not None and not _release(*registered):
        return memory
    whole.registered = None
    shrunk = _give_back(whole, nbytes)
    if registered is not None:
        array = np.frombuffer(whole, np.uint8, max(1, nbytes if shrunk else len(memory)))
        with torch.cuda.device(device), near(device):
            _lock(whole, array, device, refused)
    return memory[:nbytes] if shrunk else memory


def _give_back(memory: _Map, nbytes: int) -> bool:
    """Return the pages beyond `nbytes` to the system; False if it does not take them."""
    begin = mmap.PAGESIZE * -(-nbytes // mmap.PAGESIZE)
    if begin >= len(memory):
        return True
    try:
        memory.madvise(mmap.MADV_DONTNEED, begin, len(memory) - begin)
    except (AttributeError, OSError):  # no such advice; or the pages are locked by other means
        return False
    return True


def _lock(
    memory: _Map,
    array: np.ndarray[Any, np.dtype[np.uint8]],
    device: torch.device,
    refused: Callable[[str], None],
) -> None:
    """Register `array`, which is at the start of `memory`."""
    # Before it is: an interrupt comes while CUDA registers, and memory that is not registered may
    # be released.
    memory.registered = array.ctypes.data, device
    code = _register(array, device)
    if code:  # registering needs tables on the device, and torch may cache all of that
        torch.cuda.empty_cache()
        code = _register(array, device)
    if code:
        memory.registered = None
        refused(
            f"outcore: {format_bytes(len(array))} of host memory cannot be pinned (CUDA error "
            f"{code}): copies will be slower. Virtual machines and containers may limit it."
        )


def touch(array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Fault in all pages of `array`, which are zero, by threads on this thread's processors."""
    threads = min(_TOUCHERS, usable_cores())
    part = mmap.PAGESIZE * -(-len(array) // (threads * mmap.PAGESIZE))
    parts = [array[start : start + part : mmap.PAGESIZE] for start in range(0, len(array), part)]

    def write(pages: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        pages[:] = 0

    # NumPy releases the interpreter's lock while it writes.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, parts))


def _register(array: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> int:
    """Register `array`; return CUDA's error code, or 0."""
    error = int(_runtime().cudaHostRegister(array.ctypes.data, len(array), 0))
    if error:
        _forget_error(device)
    return error


def _release(address: int, device: torch.device) -> bool:
    """Unregister the memory at `address`; return whether CUDA did so."""
    with torch.cuda.device(device):  # a thread without a device would make a context on the first
        try:
            with contextlib.suppress(RuntimeError):  # an earlier kernel's error: others report it
                torch.cuda.synchronize(device)  # unregistering is not documented to wait for copies
        finally:  # an interrupt comes once the wait is over
            error = int(_runtime().cudaHostUnregister(address))
        if error:
            _forget_error(device)
    return not error


def _runtime() -> Any:
    """CUDA's runtime API."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it


@contextlib.contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Run this thread on the processors near `device`: memory is placed where it is first touched.

    Does nothing if the system does not say which processors those are, if it has only one node, or
    if this thread may use none of them.
    """
    processors = processors_near(device)
    before = os.sched_getaffinity(0) if processors else set[int]()
    if not processors & before:
        yield
        return
    try:
        os.sched_setaffinity(0, processors & before)
    except OSError:  # the process was moved to others, or may not choose
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processors_near(device: torch.device, system: Path = _SYSTEM) -> set[int]:
    """Numbers of the processors on the memory node that `device` is on; empty if unknown."""
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(os, "sched_setaffinity") or not hasattr(found, "pci_bus_id"):
        return set()
    domain, bus, slot = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        text = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return set()
    return parse_processors(text)


def parse_processors(text: str) -> set[int]:
    """The numbers in a list such as ``0-3,8,10-11``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which the next call that checks would report again."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
