"""virtual_chunks: physical memory in chunks of one size, mapped to any address (Sony section 4).

A request is rounded up to whole chunks. Chunks need not be adjacent, so free ones serve whatever
comes next. Nothing is lost between blocks, and less than a chunk inside each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.allocators.allocator import Heap
from outcore.allocators.best_fit import MIB, BestFit
from outcore.errors import OptionValueError

_BASE = 1 << 62
"""The first virtual address, above all addresses of the allocator for small requests."""


@dataclass(frozen=True, slots=True)
class VirtualChunks:
    """Sony's VirtualCachingAllocator.

    `chunk_bytes`: the size of a chunk; CUDA allows multiples of 2 MiB. `small_bytes`: smaller
    requests are served by a separate caching allocator (`best-fit`); 0 for none.
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
    """Counts chunks. A new one is made only if none is free; which one is used does not matter.

    None is given back: the device is full only when all chunks are in use. A request takes the same
    time however many there are.
    """

    def __init__(self, settings: VirtualChunks, small: Heap) -> None:
        self.settings, self.small = settings, small
        self.used = self.made = 0
        """Chunks in use, and chunks made so far."""
        self.end = _BASE
        """Where the next mapping starts. No address is used twice."""
        self.live: dict[int, int] = {}
        """Start address -> chunks."""

    @property
    def reserved_bytes(self) -> int:
        """All chunks, and what the allocator for small requests has reserved."""
        return self.made * self.settings.chunk_bytes + self.small.reserved_bytes

    @property
    def retries(self) -> int:
        """The retries of the allocator for small requests."""
        return self.small.retries

    @property
    def given_back_bytes(self) -> int:
        """The bytes given back by the allocator for small requests."""
        return self.small.given_back_bytes

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` with free chunks, and with new ones if these are too few."""
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
