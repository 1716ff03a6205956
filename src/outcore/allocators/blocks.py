"""blocks: segments of device memory, split into blocks and merged again."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """A range of one segment; `before` and `after` are its neighbors there.

    It is in use, free, or not `mapped`: addresses without memory, neither in use nor free.
    """

    start: int
    nbytes: int
    free: bool = False
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class Pool:
    """Segments for requests of one kind. Finding a block among n free ones is O(log n)."""

    blocks: dict[int, Block] = field(default_factory=dict)
    """All blocks, by start address."""
    free: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, start) of the free blocks, ascending."""

    def add(self, start: int, nbytes: int, *, mapped: bool = True) -> Block:
        """A new segment, as one block that is not free."""
        block = self.blocks[start] = Block(start, nbytes, mapped=mapped)
        return block

    def fitting(self, nbytes: int) -> int:
        """Index in `free` of the smallest block of `nbytes` or more, the lowest among equals."""
        return bisect_left(self.free, (nbytes, -1))

    def take(self, index: int) -> Block:
        """Remove the block at `index` of `free` from the free ones, and return it."""
        block = self.blocks[self.free.pop(index)[1]]
        block.free = False
        return block

    def cut(self, block: Block, nbytes: int) -> Block:
        """Split a block that is not free after its first `nbytes`; returns the second part."""
        rest = Block(block.start + nbytes, block.nbytes - nbytes, mapped=block.mapped)
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes = nbytes
        self.blocks[rest.start] = rest
        return rest

    def put(self, block: Block) -> Block:
        """Make a block free, and merge it with adjacent free blocks; returns the merged block."""
        if block.after is not None and block.after.free:
            self.remove(block.after)
            self.join(block, block.after)
        if block.before is not None and block.before.free:
            self.remove(block.before)
            block = self.join(block.before, block)
        block.free = True
        insort(self.free, (block.nbytes, block.start))
        return block

    def join(self, first: Block, second: Block) -> Block:
        """Append `second`, the next block of the segment, to `first`; returns `first`."""
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        del self.blocks[second.start]
        return first

    def remove(self, block: Block) -> None:
        """Remove a block from the free ones."""
        block.free = False
        del self.free[bisect_left(self.free, (block.nbytes, block.start))]


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `nbytes`."""
    return -(-nbytes // multiple) * multiple
