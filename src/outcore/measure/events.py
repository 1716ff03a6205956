"""EventMeter: meters a step on a CPU by the memory events of torch's profiler.

It is independent of outcore's own accounting: the events come from the allocator itself.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import RecordScope

from outcore.gauges import tell_metered
from outcore.measure.reading import Reading

_KINETO_SILENT = "6"
"""At lower levels, the profiler's library writes to stderr whenever it begins and ends."""

_NO_FUNCTIONS = {RecordScope.LITE_INTERPRETER}
"""A scope in which nothing here runs, so that only memory is recorded.

The public profiler records functions, too. A function that still runs when a profiler ends writes
its end into that profiler's memory, which is freed once the next profiler has begun. outcore begins
and ends the meter inside running functions. Recording only memory also costs next to nothing."""


class EventMeter:
    """Collects this thread's events of the CPU allocator, from `start` to `stop` (`Meter`).

    That includes the threads on which autograd runs this thread's backward calls.

    Only one profiler can run in a process. If the user already runs one, `start` returns False, and
    nothing is metered.
    """

    anywhere = False

    def __init__(self) -> None:
        self.running = False

    def start(self) -> bool:
        """Begin; return False if another profiler runs."""
        if _profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
            return False
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        profiler: Any = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
        config, activities = profiler.config(), profiler.kineto_activities
        _prepare_profiler(config, activities)
        tell_metered(begins=True)
        enable: Any = _enable_profiler  # the stubs lack its third argument
        enable(config, activities, _NO_FUNCTIONS)
        self.running = True
        return True

    def mark(self) -> int:
        """The time, in ns of the wall clock: events have their own times."""
        return time.time_ns()

    def sees(self) -> bool:
        """Whether a profiler is enabled on this thread."""
        return bool(_profiler_enabled())

    def stop(self) -> Reading | None:
        """End, and return the reading; None if the user started a profiler in between.

        If the user's profiler has also ended already, on this thread, it ended this one, too.

        Raises RuntimeError if the meter does not run.
        """
        if not self.running:
            raise RuntimeError("the meter was not started")
        self.running = False
        if torch.autograd.profiler._is_profiler_enabled or not _profiler_enabled():
            return None  # not ours to end
        results: Any = _disable_profiler()
        tell_metered(begins=False)
        memory = (e for e in results.events() if e.name() == "[memory]" and _on_cpu(e))
        events = sorted(((e.start_ns(), e.nbytes()) for e in memory), key=lambda event: event[0])
        return Reading(tuple(t for t, _ in events), tuple(n for _, n in events))


def _on_cpu(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")
