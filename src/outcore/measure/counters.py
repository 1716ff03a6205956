"""CounterMeter: meters a step on a GPU by the counters of torch's allocator.

The profiler would report every event. But it attaches itself to the GPU's driver for as long as the
process lives, and slows down kernel launches (docs/decisions/0018).
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

import torch

from outcore.gauges import held_bytes
from outcore.measure.reading import Reading


class Counters(Protocol):
    """The counters of an allocator."""

    def read(self) -> tuple[int, int]:
        """Return the bytes allocated now, and the most since `reset`."""
        ...

    def reset(self) -> None:
        """Count the peak from now on."""
        ...


class CudaCounters:
    """The counters of torch's allocator of a GPU (`Counters`): blocks in use, sizes rounded up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> tuple[int, int]:
        """Return the bytes allocated now, and the most since `reset`. Does not wait for the GPU."""
        held = _in_use(self.device)
        return int(held["current"]), int(held["peak"])

    def reset(self) -> None:
        """Count the peak from now on. `torch.cuda.max_memory_allocated` then does so, too."""
        torch.cuda.reset_peak_memory_stats(self.device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes that the allocator of a GPU has given out, without what is held for later tensors.

    The first figure equals `torch.cuda.memory_allocated`, which is slower: it first sorts all
    statistics by name.
    """
    return _in_use(device).get("current", 0) - held_bytes(device)


def level_and_peak(device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator of a GPU has given out, and the most at once. All is counted."""
    return CudaCounters(device).read()


def retries(device: torch.device) -> int:
    """How often the allocator of a GPU had to give back cached memory to serve a request."""
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _in_use(device: torch.device) -> dict[str, int]:
    """The allocator's counter of allocated bytes; empty before torch has initialized CUDA."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: dict[str, int] = stats.get("allocated_bytes", {}).get("all", {})
    return found


class CounterMeter:
    """Reads the counters at each mark (`Meter`).

    They count for the process: all threads are seen. The reading knows the level at marks, and the
    peak between two marks. Ask it only about times that were marked.
    """

    anywhere = True

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.running = False
        self._process = os.getpid()
        """The process that made the meter."""
        self._lock = threading.RLock()
        self._level = 0
        """Bytes allocated at the last mark."""
        self._times: list[int] = []
        """The reading so far: two events per mark, up to the peak and down to the level."""
        self._changes: list[int] = []

    def start(self) -> bool:
        """Begin. This is always possible."""
        self.counters.reset()
        self._level, _ = self.counters.read()
        self._times, self._changes = [], []
        self.running = True
        return True

    def mark(self) -> int:
        """Note the peak since the last mark, and the current level.

        Returns a time, in ns of the wall clock, between those of this mark and of the next one.
        """
        with self._lock:
            return self._take() + 1 if self.running else time.time_ns()

    def _take(self) -> int:
        level, most = self.counters.read()
        self.counters.reset()
        latest = self._times[-1] if self._times else 0
        now = max(time.time_ns(), latest + 2)  # the wall clock may be set back
        self._times += (now, now)
        self._changes += (most - self._level, level - most)
        self._level = level
        return now

    def sees(self) -> bool:
        """Whether the meter runs: counters see every thread."""
        return self.running

    def stop(self) -> Reading | None:
        """End, and return the reading; None in a forked process, which cannot use the device.

        Raises RuntimeError if the meter does not run.
        """
        with self._lock:
            if not self.running:
                raise RuntimeError("the meter was not started")
            self.running = False
            if os.getpid() != self._process:
                return None
            self._take()
            reading = Reading(tuple(self._times), tuple(self._changes))
            self._times, self._changes = [], []
            return reading
