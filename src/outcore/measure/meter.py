"""Meter: what torch's allocator did, from the profiler's memory events.

Independent of every book that outcore keeps: the events come from the allocator itself.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import RecordScope

T = TypeVar("T")

_KINETO_SILENT = "6"
"""Otherwise the profiler's library writes to stderr whenever it begins and ends."""

_CPU = torch.device("cpu")

_NO_FUNCTIONS = {RecordScope.LITE_INTERPRETER}
"""Watch memory alone: a scope in which nothing here runs.

The public profiler watches functions too, and a function that is still running when a profiler ends
writes its end into memory of that profiler, which is gone if the next one has begun. We begin and
end inside running functions. Memory alone also costs next to nothing.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Allocator events in order of time: nanoseconds of the wall clock, and bytes (+ or -)."""

    times: tuple[int, ...]
    changes: tuple[int, ...]

    def level_bytes(self, at: int) -> int:
        """Bytes held at time `at` above those held when the meter started."""
        return sum(self.changes[: bisect_right(self.times, at)])

    def peak_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """The most bytes held between two times, above those held when the meter started."""
        low, high = self._range(start, stop)
        base = sum(self.changes[:low])
        return max(accumulate(self.changes[low:high], initial=base))

    def workspace_bytes(self, start: int, stop: int) -> int:
        """Peak between two times less what was left at the end (or held before, if more)."""
        low, high = self._range(start, stop)
        levels = list(accumulate(self.changes[low:high], initial=0))
        return max(0, max(levels) - max(levels[-1], 0))

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        high = len(self.times) if stop is None else bisect_right(self.times, stop)
        return bisect_left(self.times, start), high


class Meter:
    """Collects events of the allocator of `device`, of this thread, from `start` to `stop`.

    Threads on which autograd runs this thread's backward calls belong to it.

    Only one profiler can run in a process: `start` returns False, and meters nothing, where the
    user runs one already.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device
        self.running = False

    def start(self) -> bool:
        """Begin; False where another profiler runs."""
        if _profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
            return False
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        profiler: Any = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
        config, activities = profiler.config(), profiler.kineto_activities
        _prepare_profiler(config, activities)
        enable: Any = _enable_profiler  # the stubs do not know of its third argument
        enable(config, activities, _NO_FUNCTIONS)
        self.running = True
        return True

    def stop(self) -> Reading | None:
        """End, and give what was seen; None where the user began a profiler in between.

        Raises RuntimeError where the meter does not run.
        """
        if not self.running:
            raise RuntimeError("the meter was not started")
        self.running = False
        if torch.autograd.profiler._is_profiler_enabled:
            return None  # not ours to end
        results: Any = _disable_profiler()
        memory = (e for e in results.events() if e.name() == "[memory]" and self._sees(e))
        events = sorted(((e.start_ns(), e.nbytes()) for e in memory), key=lambda event: event[0])
        return Reading(tuple(t for t, _ in events), tuple(n for _, n in events))

    def _sees(self, event: Any) -> bool:
        kind, index = event.device_type().name.lower(), event.device_index()
        return kind == self.device.type and self.device.index in (None, index)


def metered(call: Callable[[], T]) -> tuple[T, Reading]:
    """What `call` returns, and what the allocator did meanwhile.

    Raises RuntimeError where another profiler runs, or begins during the call.
    """
    meter = Meter()
    if not meter.start():
        raise RuntimeError("cannot meter memory: another profiler runs; end it first")
    try:
        result = call()
    finally:
        reading = meter.stop()
    if reading is None:
        raise RuntimeError("cannot meter memory: another profiler was started during the call")
    return result, reading
