"""best_fit: best fit with caching, as deep-learning frameworks allocate device memory.

Memory is taken from the device in segments and kept. A request gets the smallest free block that is
large enough, at the lowest address among equals. The remainder is split off if it is large enough
for a block. A freed block is merged with free neighbors in its segment. If the device is full, the
segments that are completely free are given back first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.allocators.blocks import Block, Pool, round_up

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The sizes, in bytes, in which two allocators of this kind differ.

    A request is small up to `small_most`. It is rounded up to `round_small`, or, from `round_from`
    on, to `round_large`. For a small request that finds no block, a segment of `small_segment` is
    reserved. For a large one below `medium_below` it has `medium_segment`; for any other, the
    request's size rounded up to `round_segment`. A remainder of `small_rest` or more (for large
    requests, `large_rest` or more) is split off.
    """

    small_most: int = MIB
    round_small: int = 512
    round_from: int = MIB
    round_large: int = 512
    small_segment: int
    medium_below: int = 0
    medium_segment: int = 0
    round_segment: int
    small_rest: int = 512
    large_rest: int = MIB + 1

    def rounded(self, nbytes: int) -> int:
        """Bytes of the block that serves a request for `nbytes`."""
        return round_up(nbytes, self.round_small if nbytes < self.round_from else self.round_large)

    def segment(self, nbytes: int) -> int:
        """Bytes of the segment that is reserved for a block of `nbytes`."""
        if nbytes <= self.small_most:
            return self.small_segment
        if nbytes < self.medium_below:
            return self.medium_segment
        return round_up(nbytes, self.round_segment)


PYTORCH = Rules(
    small_segment=2 * MIB,
    medium_below=10 * MIB,
    medium_segment=20 * MIB,
    round_segment=2 * MIB,
)
"""c10/cuda/CUDACachingAllocator.cpp with its default settings."""

NNABLA = Rules(round_large=128 * KIB, small_segment=MIB, round_segment=128 * KIB)
"""src/nbla/memory/caching_allocator_with_buckets.cpp: what Sony's Figure 3a was measured with."""


@dataclass(frozen=True, slots=True)
class BestFit:
    """PyTorch's caching allocator."""

    name: ClassVar[str] = "best-fit"
    summary: ClassVar[str] = "PyTorch's caching allocator: best fit, split and coalesced"

    def heap(self, capacity_bytes: int) -> BestFitHeap:
        """An empty heap on a device of `capacity_bytes`."""
        return BestFitHeap(PYTORCH, capacity_bytes)


@dataclass(frozen=True, slots=True)
class BestFitNnabla:
    """The caching allocator of Neural Network Libraries."""

    name: ClassVar[str] = "best-fit-nnabla"
    summary: ClassVar[str] = "the same by the sizes of Sony's Neural Network Libraries"

    def heap(self, capacity_bytes: int) -> BestFitHeap:
        """An empty heap on a device of `capacity_bytes`."""
        return BestFitHeap(NNABLA, capacity_bytes)


class BestFitHeap:
    """Two pools of blocks, for small and for large requests."""

    def __init__(self, rules: Rules, capacity_bytes: int) -> None:
        self.rules, self.capacity_bytes = rules, capacity_bytes
        self.small, self.large = Pool(), Pool()
        self.reserved_bytes = self.retries = self.given_back_bytes = 0
        self.end = 0
        """Where the next segment starts: after all others, also those that were given back."""

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` from the smallest block that fits, or from a new segment."""
        size = self.rules.rounded(nbytes)
        is_small = size <= self.rules.small_most
        pool = self.small if is_small else self.large
        found = pool.fitting(size)
        if found < len(pool.free):
            block = pool.take(found)
        else:
            block = self._segment(pool, self.rules.segment(size))
        if block.nbytes - size >= (self.rules.small_rest if is_small else self.rules.large_rest):
            pool.put(pool.cut(block, size))
        return block.start

    def free(self, address: int) -> None:
        """Free the block at `address`, and merge it with its free neighbors."""
        pool = self.small if address in self.small.blocks else self.large
        pool.put(pool.blocks[address])

    def _segment(self, pool: Pool, nbytes: int) -> Block:
        """Reserve a segment; returns it as one block that is in use."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            self._give_back()
        block = pool.add(self.end, nbytes)
        self.end += nbytes
        self.reserved_bytes += nbytes
        return block

    def _give_back(self) -> None:
        """Give every segment that is one free block back to the device."""
        self.retries += 1
        for pool in (self.small, self.large):
            for _, start in tuple(pool.free):
                block = pool.blocks[start]
                if block.before is None and block.after is None:
                    pool.remove(block)
                    del pool.blocks[start]
                    self.reserved_bytes -= block.nbytes
                    self.given_back_bytes += block.nbytes
