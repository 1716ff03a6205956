"""Reading: what an allocator did over a stretch of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Reading:
    """Allocator events in order of time: nanoseconds of the wall clock, and bytes (+ or -)."""

    times: tuple[int, ...]
    changes: tuple[int, ...]

    def level_bytes(self, at: int) -> int:
        """Bytes held at time `at` above those held when the meter started."""
        return self._levels[bisect_right(self.times, at)]

    @property
    def last_bytes(self) -> int:
        """Bytes held in the end above those held when the meter started."""
        return self._levels[-1]

    def peak_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """The most bytes held between two times, above those held when the meter started."""
        low, high = self._range(start, stop)
        return max(self._levels[low : high + 1])

    def workspace_bytes(self, start: int, stop: int) -> int:
        """Peak between two times less what was left at the end (or held before, if more)."""
        low, high = self._range(start, stop)
        levels = self._levels[low : high + 1]
        return max(levels) - max(levels[0], levels[-1])

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """Bytes held before the first event, and after each."""
        return tuple(accumulate(self.changes, initial=0))

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        low = bisect_left(self.times, start)
        high = len(self.times) if stop is None else bisect_right(self.times, stop)
        return low, max(low, high)
