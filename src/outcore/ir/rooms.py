"""Rooms: which slot last owned each byte range of an outer tier."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Rooms:
    """A map from byte ranges to their latest owner, as disjoint, sorted intervals."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.owners: list[tuple[int, int, int]] = []

    def take(self, start: int, stop: int, slot: int) -> list[int]:
        """Give [start, stop) to `slot`. Returns the previous owners of any of these bytes."""
        if start == stop:
            return []
        low = bisect_right(self.starts, start)
        low -= low > 0 and self.owners[low - 1][1] > start
        high = bisect_left(self.starts, stop, low)
        claimed = self.owners[low:high]
        left = [(a, start, owner) for a, _, owner in claimed[:1] if a < start]
        right = [(stop, b, owner) for _, b, owner in claimed[-1:] if b > stop]
        kept = [*left, (start, stop, slot), *right]
        self.owners[low:high] = kept
        self.starts[low:high] = [a for a, _, _ in kept]
        return [owner for _, _, owner in claimed]
