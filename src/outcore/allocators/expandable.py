"""Expandable segments: PyTorch's best fit over one segment that grows (`expandable_segments:True`).

Each pool has one stretch of addresses, far longer than the device is large; physical memory is
mapped to it in pages, where a request finds no free block that has the room. So blocks from
different requests can become one again. Where the device is full, the pages that lie in free blocks
are unmapped, and mapped again where they are needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outcore.allocators.best_fit import MIB, PYTORCH
from outcore.allocators.blocks import Block, Pool, round_up

SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB
"""Bytes that are mapped at once, in the pool of small requests and in that of large ones."""

LEAST_REST = 512
"""A rest of so many bytes is split off, in either pool."""

_ADDRESSES = LARGE_PAGE << 36
"""Bytes of each stretch; that of the large requests begins where that of the small ones ends."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: blocks of either pool, as (offset, bytes), ascending.

    Offsets are from the lowest page of the pool that has memory. `external_bytes` of the device the
    process has otherwise, `elsewhere_bytes` of them in use.
    """

    small: tuple[tuple[int, int], ...] = ()
    large: tuple[tuple[int, int], ...] = ()
    external_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """All that is in use."""
        return self.elsewhere_bytes + sum(nbytes for _, nbytes in (*self.small, *self.large))

    @property
    def wasted_bytes(self) -> int:
        """What is free in pages that are in use in part."""
        heap = ExpandableHeap(0)
        heap.hold(self)
        return heap.reserved_bytes - self.nbytes


@dataclass(frozen=True, slots=True)
class ExpandableSegments:
    """PyTorch's caching allocator as outcore sets it on a GPU.

    `fraction`: the capacity is that of `torch.cuda.set_per_process_memory_fraction`, for which a
    request that needs any memory counts as a segment of its own, however little it needs.
    """

    name: ClassVar[str] = "expandable-segments"
    summary: ClassVar[str] = "PyTorch's with expandable segments: memory is mapped where needed"

    fraction: bool = False

    def heap(self, capacity_bytes: int) -> ExpandableHeap:
        """An empty heap on a device of `capacity_bytes`."""
        return ExpandableHeap(capacity_bytes, fraction=self.fraction)


@dataclass(slots=True)
class Stretch:
    """The addresses of one pool, in pages of `page` bytes; `unmapped` holds where gaps start."""

    page: int
    pool: Pool = field(default_factory=Pool)
    unmapped: list[int] = field(default_factory=list)

    def fitting(self, size: int) -> Block | None:
        """The free block for `size`, no longer free.

        The smallest that has the room; but one that could grow counts with what it could grow to.
        """
        free, index = self.pool.free, self.pool.fitting(size)
        if index == len(free):
            return None
        while index + 1 < len(free) and self._extent(index + 1) < self._extent(index):
            index += 1
        return self.pool.take(index)

    def _extent(self, index: int) -> int:
        block = self.pool.blocks[self.pool.free[index][1]]
        after = block.after
        return block.nbytes + (0 if after is None or after.mapped else after.nbytes)

    def room(self, size: int) -> Block:
        """The first of the blocks without use, beside each other, that have `size` bytes together.

        It is the lowest that has a gap, or a free block just before one, at its beginning.
        """
        for start in self.unmapped:
            first = self.pool.blocks[start]
            if first.before is not None and first.before.free:
                first = first.before
            if sum(block.nbytes for block in _idle(first, size)) >= size:
                return first
        raise AssertionError("the stretch of addresses has an end")

    def needed(self, first: Block, size: int) -> int:
        """Bytes to map so that `size` from the start of `first` have memory."""
        left, needed = size, 0
        for block in _idle(first, size):
            if not block.mapped:
                needed += round_up(min(block.nbytes, left), self.page)
            left -= block.nbytes
        return needed

    def map(self, first: Block, size: int) -> Block:
        """A block in use of `size` bytes or more, from the start of `first`."""
        left = size
        for block in tuple(_idle(first, size)):
            if block.mapped:
                self.pool.remove(block)
            else:
                self._map(block, round_up(min(block.nbytes, left), self.page))
            left -= block.nbytes
            if block is not first:
                self.pool.join(first, block)
        return first

    def _map(self, gap: Block, nbytes: int) -> None:
        """Give the first `nbytes` of a gap memory."""
        del self.unmapped[bisect_left(self.unmapped, gap.start)]
        if nbytes < gap.nbytes:
            insort(self.unmapped, self.pool.cut(gap, nbytes).start)
        gap.mapped = True

    def lay(self, blocks: Sequence[tuple[int, int]]) -> int:
        """Put blocks, as (start, bytes), in use where nothing is mapped yet; returns mapped bytes.

        Their pages are mapped, and what is between them there is free.
        """
        mapped = 0
        for low, high, inside in self._pages(blocks):
            gap = self.pool.blocks[self.unmapped[-1]]
            if low > gap.start:
                gap = self.pool.cut(gap, low - gap.start)
                self.unmapped.append(gap.start)
            self._map(gap, high - low)
            mapped += high - low
            self._use(gap, inside)
        return mapped

    def _use(self, block: Block, inside: Iterable[tuple[int, int]]) -> None:
        """Leave what is `inside` a block in use, and free the rest."""
        for start, nbytes in inside:
            if start > block.start:
                used = self.pool.cut(block, start - block.start)
                self.pool.put(block)
                block = used
            if nbytes == block.nbytes:
                return
            block = self.pool.cut(block, nbytes)
        self.pool.put(block)

    def _pages(
        self, blocks: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Pages beside each other that blocks lie in: where they begin and end, and the blocks."""
        found: list[tuple[int, int, list[tuple[int, int]]]] = []
        for start, nbytes in blocks:
            low, high = start // self.page * self.page, round_up(start + nbytes, self.page)
            if found and low <= found[-1][1]:
                before, end, inside = found.pop()
                found.append((before, max(end, high), [*inside, (start, nbytes)]))
            else:
                found.append((low, high, [(start, nbytes)]))
        return found

    def unmap(self) -> int:
        """Take the pages that lie in free blocks away; returns their bytes."""
        taken = 0
        for _, start in tuple(self.pool.free):
            block = self.pool.blocks[start]
            low = round_up(start, self.page)
            high = (start + block.nbytes) // self.page * self.page
            if low < high:
                self.pool.remove(block)
                self._unmap(block, low, high)
                taken += high - low
        return taken

    def _unmap(self, block: Block, low: int, high: int) -> None:
        """Turn the addresses from `low` to `high` of a block into a gap, and free the rest."""
        if high < block.start + block.nbytes:
            self.pool.put(self.pool.cut(block, high - block.start))
        if block.start < low:
            whole, block = block, self.pool.cut(block, low - block.start)
            self.pool.put(whole)
        block.mapped = False
        if block.after is not None and not block.after.mapped:
            del self.unmapped[bisect_left(self.unmapped, block.after.start)]
            self.pool.join(block, block.after)
        if block.before is not None and not block.before.mapped:
            self.pool.join(block.before, block)
        else:
            insort(self.unmapped, block.start)


class ExpandableHeap:
    """Two stretches of addresses."""

    def __init__(self, capacity_bytes: int, *, fraction: bool = False) -> None:
        self.capacity_bytes, self.fraction = capacity_bytes, fraction
        self.reserved_bytes = self.retries = self.given_back_bytes = 0
        self.small, self.large = Stretch(SMALL_PAGE), Stretch(LARGE_PAGE)
        for start, stretch in ((0, self.small), (_ADDRESSES, self.large)):
            stretch.pool.add(start, _ADDRESSES, mapped=False)
            stretch.unmapped.append(start)

    def hold(self, held: Held) -> None:
        """Begin with what a process holds, before any request."""
        large = [(_ADDRESSES + offset, nbytes) for offset, nbytes in held.large]
        mapped = self.small.lay(held.small) + self.large.lay(large)
        self.reserved_bytes += mapped + held.external_bytes

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` from a free block that fits, or from one that grows."""
        size = round_up(nbytes, PYTORCH.round_small)
        stretch = self.small if size <= PYTORCH.small_most else self.large
        block = stretch.fitting(size) or self._grown(stretch, size)
        if block.nbytes - size >= LEAST_REST:
            stretch.pool.put(stretch.pool.cut(block, size))
        return block.start

    def free(self, address: int) -> None:
        """Free the block at `address`, with its free neighbours as one."""
        stretch = self.small if address in self.small.pool.blocks else self.large
        stretch.pool.put(stretch.pool.blocks[address])

    def _grown(self, stretch: Stretch, size: int) -> Block:
        """A block in use of `size` bytes or more, part of which had no memory before."""
        first = stretch.room(size)
        asked = PYTORCH.segment(size) if self.fraction else stretch.needed(first, size)
        if self.reserved_bytes + asked > self.capacity_bytes:
            self.retries += 1
            given_back = self.small.unmap() + self.large.unmap()
            self.given_back_bytes += given_back
            self.reserved_bytes -= given_back
            first = stretch.room(size)
        self.reserved_bytes += stretch.needed(first, size)
        return stretch.map(first, size)


def _idle(first: Block, size: int) -> Iterator[Block]:
    """Blocks from `first` on that are free or gaps, until they have `size` bytes together."""
    block: Block | None = first
    while size > 0 and block is not None and (block.free or not block.mapped):
        yield block
        size -= block.nbytes
        block = block.after
