"""Meter: what tells how much memory a step takes, independently of every book of outcore's."""

from __future__ import annotations

from typing import Protocol

import torch

from outcore.measure.counters import CounterMeter, CudaCounters
from outcore.measure.events import EventMeter
from outcore.measure.reading import Reading


class Meter(Protocol):
    """Watches a device's allocator from `start` to `stop`."""

    running: bool

    @property
    def anywhere(self) -> bool:
        """Whether it sees all threads, and any of them may end it; else the one that began it."""
        ...

    def start(self) -> bool:
        """Begin; False where that is impossible now."""
        ...

    def mark(self) -> None:
        """Note that the reading will be asked for the time right after this."""
        ...

    def sees(self) -> bool:
        """Whether it sees what this thread allocates."""
        ...

    def stop(self) -> Reading | None:
        """End, and give what was seen; None where that came to nothing.

        Raises RuntimeError where the meter does not run.
        """
        ...


def open_meter(device: torch.device) -> Meter:
    """The one for `device`."""
    return CounterMeter(CudaCounters(device)) if device.type == "cuda" else EventMeter()
