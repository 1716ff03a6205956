"""Reading: the events of an allocator over a period of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Reading:
    """Allocator events in order of time."""

    times: tuple[int, ...]
    """Nanoseconds of the wall clock."""
    changes: tuple[int, ...]
    """Bytes allocated (positive) or freed (negative) by each event."""

    def level_bytes(self, at: int) -> int:
        """Bytes held at time `at`, relative to the start of the meter."""
        return self._levels[bisect_right(self.times, at)]

    @property
    def last_bytes(self) -> int:
        """Bytes held at the end, relative to the start of the meter."""
        return self._levels[-1]

    def peak_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """The most bytes held between two times, relative to the start of the meter."""
        low, high = self._range(start, stop)
        return max(self._levels[low : high + 1])

    def workspace_bytes(self, start: int, stop: int) -> int:
        """The peak between two times, minus the bytes held at their end (or before, if more)."""
        low, high = self._range(start, stop)
        levels = self._levels[low : high + 1]
        return max(levels) - max(levels[0], levels[-1])

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """Bytes held before the first event, and after each event."""
        return tuple(accumulate(self.changes, initial=0))

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        """The range of levels between two times."""
        low = bisect_left(self.times, start)
        high = len(self.times) if stop is None else bisect_right(self.times, stop)
        return low, max(low, high)
