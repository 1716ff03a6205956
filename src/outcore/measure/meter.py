"""Meter: measures how much memory a step needs, independently of outcore's own accounting."""

from __future__ import annotations

from typing import Protocol

import torch

from outcore.measure.counters import CounterMeter, CudaCounters
from outcore.measure.events import EventMeter
from outcore.measure.reading import Reading


class Meter(Protocol):
    """Watches a device's allocator from `start` to `stop`."""

    running: bool
    """Whether the meter was started and not stopped."""

    @property
    def anywhere(self) -> bool:
        """Whether it sees all threads, and any thread may stop it.

        Otherwise it belongs to the thread that started it.
        """
        ...

    def start(self) -> bool:
        """Begin; return False if that is impossible now."""
        ...

    def mark(self) -> int:
        """Note the time, in ns of the wall clock, that someone will ask the reading about.

        Returns it; it is later than all that was noted so far.
        """
        ...

    def sees(self) -> bool:
        """Whether it sees what this thread allocates."""
        ...

    def stop(self) -> Reading | None:
        """End, and return the reading; None if nothing could be read.

        Raises RuntimeError if the meter does not run.
        """
        ...


def open_meter(device: torch.device) -> Meter:
    """Make the meter for `device`."""
    return CounterMeter(CudaCounters(device)) if device.type == "cuda" else EventMeter()
