"""Allocator: what serves requests for device memory, as a model that only counts."""

from __future__ import annotations

from typing import ClassVar, Protocol


class Heap(Protocol):
    """The state of one allocator in one process. What lives never overlaps in addresses."""

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has taken from the device and not given back."""
        ...

    @property
    def retries(self) -> int:
        """How often so far what was free had to go back to the device for a request to be served.

        PyTorch's `num_alloc_retries`: compute stands still meanwhile.
        """
        ...

    @property
    def given_back_bytes(self) -> int:
        """What went back to the device so, all times together."""
        ...

    def malloc(self, nbytes: int) -> int:
        """Serve a request for `nbytes`, at least one; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Take back what `malloc` returned at `address`."""
        ...


class Allocator(Protocol):
    """A kind of allocator. An implementation is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name it is known by: `best-fit`."""
    summary: ClassVar[str]
    """What it does, in one line."""

    def heap(self, capacity_bytes: int) -> Heap:
        """An empty heap on a device of `capacity_bytes`.

        A request is served in any case: what is reserved beyond the capacity is what a real process
        would have failed for want of.
        """
        ...
