"""Ideal: an allocator without waste, which reserves exactly what is live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Ideal:
    """Reserves the bytes that are requested, wherever they lie: the peak of `ir/memory.py`."""

    name: ClassVar[str] = "ideal"
    summary: ClassVar[str] = "reserves what is live, and nothing else"

    def heap(self, capacity_bytes: int) -> IdealHeap:  # noqa: ARG002 - it never gives back late
        """An empty heap; the capacity is ignored."""
        return IdealHeap()


@dataclass(slots=True)
class IdealHeap:
    """Sizes by address. No address is used twice."""

    reserved_bytes: int = 0
    retries: int = 0
    given_back_bytes: int = 0
    end: int = 0
    live: dict[int, int] = field(default_factory=dict)

    def malloc(self, nbytes: int) -> int:
        """Serve `nbytes` after all addresses used so far."""
        address = self.end
        self.live[address] = nbytes
        self.end += nbytes
        self.reserved_bytes += nbytes
        return address

    def free(self, address: int) -> None:
        """Give the bytes at `address` back to the device."""
        self.reserved_bytes -= self.live.pop(address)
