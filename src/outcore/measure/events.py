"""EventMeter: what torch's allocator did, from the profiler's memory events.

Independent of every book that outcore keeps: the events come from the allocator itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import RecordScope

from outcore.measure.reading import Reading

_KINETO_SILENT = "6"
"""Otherwise the profiler's library writes to stderr whenever it begins and ends."""

_NO_FUNCTIONS = {RecordScope.LITE_INTERPRETER}
"""Watch memory alone: a scope in which nothing here runs.

The public profiler watches functions too, and a function that is still running when a profiler ends
writes its end into memory of that profiler, which is gone if the next one has begun. We begin and
end inside running functions. Memory alone also costs next to nothing.
"""


class EventMeter:
    """Collects events of the CPU's allocator, of this thread, from `start` to `stop` (`Meter`).

    Threads on which autograd runs this thread's backward calls belong to it.

    Only one profiler can run in a process: `start` returns False, and meters nothing, where the
    user runs one already.
    """

    anywhere = False

    def __init__(self) -> None:
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

    def mark(self) -> None:
        """Nothing to do: events have times of their own."""

    def sees(self) -> bool:
        """Whether this thread carries a profiler."""
        return bool(_profiler_enabled())

    def stop(self) -> Reading | None:
        """End, and give what was seen; None where the user began a profiler in between.

        Where that has ended already, on this thread, it ended this one, too.

        Raises RuntimeError where the meter does not run.
        """
        if not self.running:
            raise RuntimeError("the meter was not started")
        self.running = False
        if torch.autograd.profiler._is_profiler_enabled or not _profiler_enabled():
            return None  # not ours to end
        results: Any = _disable_profiler()
        memory = (e for e in results.events() if e.name() == "[memory]" and _on_cpu(e))
        events = sorted(((e.start_ns(), e.nbytes()) for e in memory), key=lambda event: event[0])
        return Reading(tuple(t for t, _ in events), tuple(n for _, n in events))


def _on_cpu(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")
