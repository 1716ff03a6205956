"""Allocator: the interface of a model of a device memory allocator, which only counts."""

from __future__ import annotations

from typing import ClassVar, Protocol


class Heap(Protocol):
    """The state of one allocator in one process. Live blocks never overlap in addresses."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has taken from the device and not given back."""
        ...

    @property
    def retries(self) -> int:
        """How often free memory had to be given back to the device to serve a request.

        PyTorch's `num_alloc_retries`. Compute waits each time.
        """
        ...

    @property
    def given_back_bytes(self) -> int:
        """Bytes given back to the device in this way, all times together."""
        ...

    def malloc(self, nbytes: int) -> int:
        """Serve a request for `nbytes`, at least one; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Free what `malloc` returned at `address`."""
        ...


class Allocator(Protocol):
    """A kind of allocator. An implementation is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name in specs: `best-fit`."""
    summary: ClassVar[str]
    """What it does, in one line."""

    def heap(self, capacity_bytes: int) -> Heap:
        """An empty heap on a device of `capacity_bytes`.

        Every request is served. If more than the capacity is reserved, a real process would have
        run out of memory.
        """
        ...
