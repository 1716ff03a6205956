"""first_fit: first fit in one pool (SuperNeurons section 3.2.1).

The pool is reserved on the device as a whole, before training, and divided into blocks. A request
gets the first hole, by address, that is large enough. The rest of the hole stays where it is. A
freed range is merged with adjacent holes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import OptionValueError


@dataclass(frozen=True, slots=True)
class FirstFit:
    """SuperNeurons' memory pool. `block_bytes`: what a request is rounded up to."""

    name: ClassVar[str] = "first-fit"
    summary: ClassVar[str] = "SuperNeurons' pool: the first hole that fits"
    block_bytes: int = 2**10

    def __post_init__(self) -> None:
        """Raise OptionValueError unless a block has at least one byte."""
        if self.block_bytes < 1:
            reason = "a block has at least one byte"
            raise OptionValueError(option="block_bytes", value=self.block_bytes, reason=reason)

    def heap(self, capacity_bytes: int) -> FirstFitHeap:  # noqa: ARG002 - see `FirstFitHeap`
        """An empty pool."""
        return FirstFitHeap(self.block_bytes)


class FirstFitHeap:
    """A pool without an end: places do not depend on its size, as long as that is enough.

    `reserved_bytes` is the size that would have been enough so far. A request is linear in the
    number of holes.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.reserved_bytes = self.retries = self.given_back_bytes = 0
        self.holes: list[tuple[int, int]] = []
        """(start, stop) of each hole, ascending; no two are adjacent."""
        self.live: dict[int, int] = {}
        """Start -> stop of the ranges in use."""

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` from the first hole that fits, else at the end of the pool."""
        size = -(-nbytes // self.block_bytes) * self.block_bytes
        for index, (start, stop) in enumerate(self.holes):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self.holes[index : index + 1] = rest
                break
        else:
            start = self._at_the_end(size)
        self.live[start] = start + size
        return start

    def free(self, address: int) -> None:
        """Make a hole at `address`, and merge it with adjacent ones."""
        start, stop = address, self.live.pop(address)
        at = bisect_left(self.holes, (start, stop))
        after = at
        if at and self.holes[at - 1][1] == start:
            at -= 1
            start = self.holes[at][0]
        if after < len(self.holes) and self.holes[after][0] == stop:
            stop = self.holes[after][1]
            after += 1
        self.holes[at:after] = [(start, stop)]

    def _at_the_end(self, size: int) -> int:
        """The start of `size` bytes that extend the pool. A hole at its end is used first."""
        start = self.reserved_bytes
        if self.holes and self.holes[-1][1] == start:
            start = self.holes.pop()[0]
        self.reserved_bytes = start + size
        return start
