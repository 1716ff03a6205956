"""pinned: host memory that a GPU copies to and from at full speed, beside its own work.

Ordinary memory, registered with the driver: torch's own pinned allocator rounds sizes up to powers
of two, which for one room of a whole step's data can be twice as much. The pages are put on the
memory node of the GPU where the system tells which that is.
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

from outcore.errors import HostMemoryError
from outcore.units import format_bytes

_SYSTEM = Path("/sys")
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Without it Linux may refuse a map as large as most of the memory. (Python knows it from 3.13.)"""
_TOUCHERS = 16
"""Threads that ask for pages at most: registering does so too, one after the other."""


class _Map(mmap.mmap):
    """Memory that is no longer registered when the system has it back.

    A forked process has none of it.
    """

    process: int | None = None
    """Whose it is; None: the system had no such memory."""
    registered: tuple[int, torch.device] | None = None
    """Where, and for which device."""

    def __new__(cls, nbytes: int) -> Self:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        made = super().__new__(cls, -1, max(1, nbytes), flags=flags)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would copy what is written later
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    made.madvise(getattr(mmap, advice))
        made.process = os.getpid()
        return made

    # Whoever watches a map, or with NumPy 2.5 an array, hears of its end when the memory is gone.
    def __del__(self) -> None:
        if self.process not in (None, os.getpid()):
            # What lies there by now would be given back in its place: never let that happen.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        elif self.registered is not None and not sys.is_finalizing():
            _release(*self.registered)


_maps: WeakValueDictionary[int, _Map] = WeakValueDictionary()
"""By their addresses."""


def pinned(
    nbytes: int, device: torch.device, refused: Callable[[str], None] = warnings.warn
) -> torch.Tensor:
    """Flat bytes on the host, registered for `device` until nobody refers to them any more.

    Where registering is refused the memory is an ordinary one, and `refused` is told: copies are
    slower then, and the host waits for them. Raises HostMemoryError where the system has no such
    memory.
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
    """The first `nbytes` of what `pinned` gave for `device`; the system has the other pages back.

    All of it where the system does not take them. Nobody else may use that memory, nor a copy be
    under way. `refused` as for `pinned`.
    """
    whole = _maps[memory.data_ptr()]
    registered, whole.registered = whole.registered, None
    if registered is not None and not _release(*registered):
        whole.registered = registered
        return memory
    shrunk = _give_back(whole, nbytes)
    if registered is not None:
        array = np.frombuffer(whole, np.uint8, max(1, nbytes if shrunk else len(memory)))
        with torch.cuda.device(device), near(device):
            _lock(whole, array, device, refused)
    return memory[:nbytes] if shrunk else memory


def _give_back(memory: _Map, nbytes: int) -> bool:
    """Let the system have the pages beyond `nbytes` back; whether it takes them."""
    begin = mmap.PAGESIZE * -(-nbytes // mmap.PAGESIZE)
    if begin >= len(memory):
        return True
    try:
        memory.madvise(mmap.MADV_DONTNEED, begin, len(memory) - begin)
    except (AttributeError, OSError):  # there is no such advice; pages are locked otherwise
        return False
    return True


def _lock(
    memory: _Map,
    array: np.ndarray[Any, np.dtype[np.uint8]],
    device: torch.device,
    refused: Callable[[str], None],
) -> None:
    """Register `array`, which `memory` begins with."""
    code = _register(array, device)
    if code:  # registering has tables on the device, and torch may keep all of that
        torch.cuda.empty_cache()
        code = _register(array, device)
    if code:
        refused(
            f"outcore: {format_bytes(len(array))} of host memory cannot be locked (CUDA error "
            f"{code}): copies will be slower. Virtual machines and containers may have a limit."
        )
    else:
        memory.registered = array.ctypes.data, device


def touch(array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Have the system give all pages of `array`, which are zero, to threads of this one's place."""
    threads = min(_TOUCHERS, len(os.sched_getaffinity(0)))
    part = mmap.PAGESIZE * -(-len(array) // (threads * mmap.PAGESIZE))
    parts = [array[start : start + part : mmap.PAGESIZE] for start in range(0, len(array), part)]

    def write(pages: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        pages[:] = 0

    with ThreadPoolExecutor(threads) as pool:  # NumPy lets others run while it writes
        list(pool.map(write, parts))


def _register(array: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> int:
    """CUDA's error; 0 where there is none."""
    error = int(_runtime().cudaHostRegister(array.ctypes.data, len(array), 0))
    if error:
        _forget_error(device)
    return error


def _release(address: int, device: torch.device) -> bool:
    """Register no more what is at `address`; whether CUDA did so."""
    with torch.cuda.device(device):  # a thread that is on none would make a context on the first
        with contextlib.suppress(RuntimeError):  # of an earlier kernel: others will hear of it
            torch.cuda.synchronize(device)  # nobody says that unregistering waits for copies
        error = int(_runtime().cudaHostUnregister(address))
        if error:
            _forget_error(device)
    return not error


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it


@contextlib.contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Keep this thread on the processors beside `device`: memory lands where it is first touched.

    Does nothing where the system does not tell which those are, or has only one node.
    """
    processors = processors_near(device)
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, processors)
    except OSError:  # not ours to use, all of them
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processors_near(device: torch.device, system: Path = _SYSTEM) -> set[int]:
    """Numbers of the processors on the memory node that `device` is attached to; empty: unknown."""
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
    """The numbers of a list like ``0-3,8,10-11``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}


def _forget_error(device: torch.device) -> None:
    """CUDA reports a failed call once more at the next one that asks: let that be here."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
