"""measure: measure the time and memory of a step while it trains."""

from __future__ import annotations

from outcore.measure.clock import Stopwatch
from outcore.measure.counters import allocated_bytes, level_and_peak, retries
from outcore.measure.exhausted import causes, ran_out, says_memory
from outcore.measure.meter import Meter, open_meter
from outcore.measure.metered import metered
from outcore.measure.reading import Reading
from outcore.measure.resident import Elsewhere, frozen_objects, resident_bytes

__all__ = [
    "Elsewhere",
    "Meter",
    "Reading",
    "Stopwatch",
    "allocated_bytes",
    "causes",
    "frozen_objects",
    "level_and_peak",
    "metered",
    "open_meter",
    "ran_out",
    "resident_bytes",
    "retries",
    "says_memory",
]
