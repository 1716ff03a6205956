"""Reading: what an allocator did over a stretch of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate


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
