"""expandable: PyTorch's best fit over segments that grow (`expandable_segments:True`).

Each pool has one stretch of addresses, far longer than the device's memory. If no free block is
large enough for a request, physical memory is mapped into the stretch in pages. So blocks of
different requests can be merged. If the device is full, the pages that lie completely in free
blocks are unmapped; they are mapped again where they are needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outcore.allocators.best_fit import MIB, PYTORCH
from outcore.allocators.blocks import Block, Pool, round_up

SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB
"""Bytes mapped at once, in the pool of small requests and in the pool of large ones."""

LEAST_REST = 512
"""A remainder of this many bytes or more is split off, in both pools."""

_ADDRESSES = LARGE_PAGE << 36
"""Bytes of each stretch. The one for large requests begins where the one for small ones ends."""


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks in use in a process, by pool, as (offset, bytes), ascending.

    Offsets are from the lowest page of the pool that has memory. `external_bytes`: memory that the
    process has reserved outside these two stretches; `elsewhere_bytes`: how much of it is in use.
    """

    small: tuple[tuple[int, int], ...] = ()
    large: tuple[tuple[int, int], ...] = ()
    external_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """All bytes in use."""
        return self.elsewhere_bytes + sum(nbytes for _, nbytes in (*self.small, *self.large))

    @property
    def wasted_bytes(self) -> int:
        """Free bytes in pages that are partly in use."""
        heap = ExpandableHeap(0)
        heap.hold(self)
        return heap.reserved_bytes - self.nbytes


@dataclass(frozen=True, slots=True)
class ExpandableSegments:
    """PyTorch's caching allocator, as outcore sets it on a GPU.

    `fraction`: the capacity comes from `torch.cuda.set_per_process_memory_fraction`. A request that
    needs any memory then counts as a whole segment, however little it needs.
    """

    name: ClassVar[str] = "expandable-segments"
    summary: ClassVar[str] = "PyTorch's with expandable segments: memory is mapped where needed"

    fraction: bool = False

    def heap(self, capacity_bytes: int) -> ExpandableHeap:
        """An empty heap on a device of `capacity_bytes`."""
        return ExpandableHeap(capacity_bytes, fraction=self.fraction)


@dataclass(slots=True)
class AddressRange:
    """The addresses of one pool, in pages of `page` bytes. `unmapped`: starts of gaps, sorted."""

    page: int
    pool: Pool = field(default_factory=Pool)
    unmapped: list[int] = field(default_factory=list)

    def fitting(self, size: int) -> Block | None:
        """Take a free block for `size`, or None if there is none.

        It is the smallest that is large enough. A block that could grow counts with the size that
        it could grow to.
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
        """The first block of the lowest run of unused blocks that have `size` bytes together.

        Such a run begins with a gap, or with a free block directly before a gap.
        """
        for start in self.unmapped:
            first = self.pool.blocks[start]
            if first.before is not None and first.before.free:
                first = first.before
            if sum(block.nbytes for block in _idle(first, size)) >= size:
                return first
        raise AssertionError("the stretch of addresses has an end")

    def needed(self, first: Block, size: int) -> int:
        """Bytes to map so that `size` bytes from the start of `first` have memory."""
        left, needed = size, 0
        for block in _idle(first, size):
            if not block.mapped:
                needed += round_up(min(block.nbytes, left), self.page)
            left -= block.nbytes
        return needed

    def map(self, first: Block, size: int) -> Block:
        """Make one block in use of `size` bytes or more, from the start of `first`."""
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
        """Map memory to the first `nbytes` of a gap."""
        del self.unmapped[bisect_left(self.unmapped, gap.start)]
        if nbytes < gap.nbytes:
            insort(self.unmapped, self.pool.cut(gap, nbytes).start)
        gap.mapped = True

    def lay(self, blocks: Sequence[tuple[int, int]]) -> int:
        """Put blocks, as (start, bytes), in use where nothing is mapped yet; returns mapped bytes.

        Their pages are mapped, and the space between them in these pages is free.
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
        """Leave the ranges `inside` a block in use, and free the rest of it."""
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
        """The runs of adjacent pages that contain blocks: start, end, and the blocks in them."""
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
        """Unmap the pages that lie completely in free blocks; returns their bytes."""
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
    """Two stretches of addresses, for small and for large requests."""

    def __init__(self, capacity_bytes: int, *, fraction: bool = False) -> None:
        self.capacity_bytes, self.fraction = capacity_bytes, fraction
        self.reserved_bytes = self.retries = self.given_back_bytes = 0
        self.small, self.large = AddressRange(SMALL_PAGE), AddressRange(LARGE_PAGE)
        for start, stretch in ((0, self.small), (_ADDRESSES, self.large)):
            stretch.pool.add(start, _ADDRESSES, mapped=False)
            stretch.unmapped.append(start)

    def hold(self, held: Held) -> None:
        """Start with the blocks that a process holds, before any request."""
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
        """Free the block at `address`, and merge it with its free neighbors."""
        stretch = self.small if address in self.small.pool.blocks else self.large
        stretch.pool.put(stretch.pool.blocks[address])

    def _grown(self, stretch: AddressRange, size: int) -> Block:
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
    """The blocks from `first` on that are free or gaps, until they have `size` bytes together."""
    block: Block | None = first
    while size > 0 and block is not None and (block.free or not block.mapped):
        yield block
        size -= block.nbytes
        block = block.after
