"""Virtual chunks: physical memory in chunks of one size, mapped to any address (Sony section 4).

A request is rounded up to whole chunks. Chunks need not lie beside each other, so those that are
free serve whatever comes next: nothing is lost between blocks, and less than a chunk inside each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.allocators.allocator import Heap
from outcore.allocators.best_fit import MIB, BestFit
from outcore.errors import OptionValueError

_BASE = 1 << 62
"""The first virtual address, beyond all that the allocator of small requests gives out."""


@dataclass(frozen=True, slots=True)
class VirtualChunks:
    """Sony's VirtualCachingAllocator.

    `chunk_bytes`: the size of a chunk; CUDA takes multiples of 2 MiB. `small_bytes`: requests below
    go to a caching allocator of their own (`best-fit`); 0 for none.
    """

    name: ClassVar[str] = "virtual-chunks"
    summary: ClassVar[str] = "Sony's: chunks of one size, mapped to any address"
    chunk_bytes: int = 20 * MIB
    small_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise OptionValueError unless a chunk has at least one byte."""
        if self.chunk_bytes < 1:
            reason = "a chunk has at least one byte"
            raise OptionValueError(option="chunk_bytes", value=self.chunk_bytes, reason=reason)

    def heap(self, capacity_bytes: int) -> VirtualChunksHeap:
        """An empty heap on a device of `capacity_bytes`."""
        return VirtualChunksHeap(self, BestFit().heap(capacity_bytes))


class VirtualChunksHeap:
    """Counts chunks: a new one is made only where none is free, and which one is used is no matter.

    None is given back: the device is full only when all of them are in use. A request takes the
    same time however many there are.
    """

    def __init__(self, settings: VirtualChunks, small: Heap) -> None:
        self.settings, self.small = settings, small
        self.used = self.made = 0
        """Chunks."""
        self.end = _BASE
        """Where the next mapping starts: no address is used twice."""
        self.live: dict[int, int] = {}
        """Start -> chunks."""

    @property
    def reserved_bytes(self) -> int:
        """All chunks, and what the allocator of small requests has taken."""
        return self.made * self.settings.chunk_bytes + self.small.reserved_bytes

    @property
    def retries(self) -> int:
        """Those of the allocator of small requests."""
        return self.small.retries

    @property
    def given_back_bytes(self) -> int:
        """That of the allocator of small requests."""
        return self.small.given_back_bytes

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` with chunks that are free, and with new ones where these are too few."""
        if nbytes < self.settings.small_bytes:
            return self.small.malloc(nbytes)
        chunks = -(-nbytes // self.settings.chunk_bytes)
        self.used += chunks
        self.made = max(self.made, self.used)
        address = self.end
        self.live[address] = chunks
        self.end += chunks * self.settings.chunk_bytes
        return address

    def free(self, address: int) -> None:
        """Free the chunks that are mapped at `address`."""
        if address in self.live:
            self.used -= self.live.pop(address)
        else:
            self.small.free(address)
