"""CounterMeter: what a GPU's allocator did, from its own counters.

The profiler would tell every event, but attaches itself to the GPU's driver for as long as the
process lives, and slows the launch of kernels down (docs/decisions/0018).
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
    """What an allocator counts."""

    def read(self) -> tuple[int, int]:
        """Bytes held now, and the most that were since `reset`."""
        ...

    def reset(self) -> None:
        """Count the most from now on."""
        ...


class CudaCounters:
    """Those of torch's allocator of a GPU (`Counters`): blocks in use, as rounded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> tuple[int, int]:
        """Bytes held now, and the most that were since `reset`. Does not wait for the GPU."""
        held = _in_use(self.device)
        return int(held["current"]), int(held["peak"])

    def reset(self) -> None:
        """Count the most from now on: `torch.cuda.max_memory_allocated` does so, too."""
        torch.cuda.reset_peak_memory_stats(self.device)


def allocated_bytes(device: torch.device) -> int:
    """What the allocator of a GPU has given out, but for what is held for tensors to come.

    That of `torch.cuda.memory_allocated`, which sorts all that there is to know by name first.
    """
    return _in_use(device).get("current", 0) - held_bytes(device)


def retries(device: torch.device) -> int:
    """How often the allocator of a GPU had to give memory back to serve a request."""
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _in_use(device: torch.device) -> dict[str, int]:
    """Nothing before torch has begun with GPUs."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: dict[str, int] = stats.get("allocated_bytes", {}).get("all", {})
    return found


class CounterMeter:
    """Reads counters at each mark (`Meter`). They are the process's: it sees all threads.

    Its reading tells the level at marks, and the most in between. It is to be asked for times that
    were marked.
    """

    anywhere = True

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.running = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._level = 0
        self._times: list[int] = []
        self._changes: list[int] = []

    def start(self) -> bool:
        """Begin; nothing stands in its way."""
        self.counters.reset()
        self._level, _ = self.counters.read()
        self._times, self._changes = [], []
        self.running = True
        return True

    def mark(self) -> None:
        """Take the most since the last mark, and what is held now."""
        with self._lock:
            if self.running:
                self._take()

    def _take(self) -> None:
        level, most = self.counters.read()
        self.counters.reset()
        now = max([time.time_ns(), *self._times[-1:]])  # the wall clock may be set back
        self._times += (now, now)
        self._changes += (most - self._level, level - most)
        self._level = level

    def sees(self) -> bool:
        """Always: counters have no threads."""
        return self.running

    def stop(self) -> Reading | None:
        """End, and give what was seen; None in a forked process, which has no device.

        Raises RuntimeError where the meter does not run.
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
