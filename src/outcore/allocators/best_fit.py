"""Best fit with caching, as deep-learning frameworks allocate device memory.

Memory is taken from the device in segments and kept. A request gets the smallest free block that
has the room, at the lowest address among equals; the rest is split off where it is worth a block of
its own. A freed block joins its free neighbours in the segment. Where the device is full, the
segments that are free as a whole are given back first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import ClassVar

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Sizes in bytes that two allocators of this kind differ in.

    A request is small up to `small_most`. It is rounded up to `round_small`, or, from `round_from`
    on, to `round_large`. A small one that finds no block takes a segment of `small_segment`; a
    large one below `medium_below` takes `medium_segment`, any other its own size rounded up to
    `round_segment`. A rest of `small_rest` or more (of `large_rest` or more, in the pool of the
    large) is split off.
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
        return _up(nbytes, self.round_small if nbytes < self.round_from else self.round_large)

    def segment(self, nbytes: int) -> int:
        """Bytes of the segment that is taken for a block of `nbytes`."""
        if nbytes <= self.small_most:
            return self.small_segment
        if nbytes < self.medium_below:
            return self.medium_segment
        return _up(nbytes, self.round_segment)


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


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment, in use or free; `before` and `after` are its neighbours there."""

    start: int
    nbytes: int
    pool: Pool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class Pool:
    """Blocks of the small requests, or of the large ones.

    `free` holds (bytes, start) of the free ones, ascending; a rest of `least_rest` is split off.
    """

    least_rest: int
    free: list[tuple[int, int]] = field(default_factory=list)


class BestFitHeap:
    """Two pools of blocks. A request takes O(log n) comparisons for n free blocks."""

    def __init__(self, rules: Rules, capacity_bytes: int) -> None:
        self.rules, self.capacity_bytes = rules, capacity_bytes
        self.small, self.large = Pool(rules.small_rest), Pool(rules.large_rest)
        self.blocks: dict[int, Block] = {}
        """All blocks, free or not, by start."""
        self.reserved_bytes = 0
        self.end = 0
        """Where the next segment starts: behind all others, whether they are still held or not."""

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` from the smallest block that fits, or from a new segment."""
        size = self.rules.rounded(nbytes)
        pool = self.small if size <= self.rules.small_most else self.large
        block = self._take(pool, size) or self._segment(pool, self.rules.segment(size))
        if block.nbytes - size >= pool.least_rest:
            self._split(block, size)
        return block.start

    def free(self, address: int) -> None:
        """Free the block at `address`, with its free neighbours as one."""
        block = self.blocks[address]
        if block.after is not None and block.after.free:
            self._remove(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._join(block.before, block)
        block.free = True
        insort(block.pool.free, (block.nbytes, block.start))

    def _take(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block of at least `size`, no longer free."""
        found = bisect_left(pool.free, (size, -1))
        if found == len(pool.free):
            return None
        block = self.blocks[pool.free.pop(found)[1]]
        block.free = False
        return block

    def _segment(self, pool: Pool, nbytes: int) -> Block:
        """A new segment as one block that is in use."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            self._give_back()
        block = self.blocks[self.end] = Block(self.end, nbytes, pool)
        self.end += nbytes
        self.reserved_bytes += nbytes
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut what is behind the first `size` bytes off, as a free block."""
        rest = Block(block.start + size, block.nbytes - size, block.pool, free=True, before=block)
        rest.after, block.after = block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes = size
        self.blocks[rest.start] = rest
        insort(block.pool.free, (rest.nbytes, rest.start))

    def _join(self, first: Block, second: Block) -> Block:
        """Append `second` to its neighbour `first`."""
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        del self.blocks[second.start]
        return first

    def _remove(self, block: Block) -> None:
        """Take a free block out of its pool's list."""
        free = block.pool.free
        del free[bisect_left(free, (block.nbytes, block.start))]

    def _give_back(self) -> None:
        """Return every segment that is one free block to the device."""
        for pool in (self.small, self.large):
            whole = {start for _, start in pool.free if self._is_segment(self.blocks[start])}
            pool.free = [entry for entry in pool.free if entry[1] not in whole]
            for start in whole:
                self.reserved_bytes -= self.blocks.pop(start).nbytes

    def _is_segment(self, block: Block) -> bool:
        return block.before is None and block.after is None


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
