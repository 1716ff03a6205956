"""metered: meter the CPU memory of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outcore.measure.events import EventMeter
from outcore.measure.reading import Reading

T = TypeVar("T")


def metered(call: Callable[[], T]) -> tuple[T, Reading]:
    """Return what `call` returns, and a reading of the allocator during the call.

    Raises RuntimeError if another profiler runs, or is started during the call.
    """
    meter = EventMeter()
    if not meter.start():
        raise RuntimeError("cannot meter memory: another profiler is running; stop it first")
    try:
        result = call()
    finally:
        reading = meter.stop()
    if reading is None:
        raise RuntimeError("cannot meter memory: another profiler was started during the call")
    return result, reading
