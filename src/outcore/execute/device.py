"""device: the interface to a device that works in queues: commands, events and memory.

A queue runs its commands in order, concurrently with all other queues and with the host. The host
never waits unless a method says so. An event marks a position in a queue. Another queue that waits
for the event continues once the first queue has reached it. Everything that orders two queues is a
call of this interface, so a test device can check that no wait is missing (`tests/cpu/queues.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

Queue: TypeAlias = Any
"""A queue of the device; opaque to all but the device."""

Event: TypeAlias = Any
"""A position in a queue, once recorded; opaque to all but the device."""


class Device(Protocol):
    """A device with two queues for copies, and a current queue for each thread that computes."""

    @property
    def out(self) -> Queue:
        """The queue for copies away from the device."""
        ...

    @property
    def into(self) -> Queue:
        """The queue for copies back to the device."""
        ...

    @property
    def generator(self) -> Any:
        """The generator that random ops on the device draw from (`driver.Generator`)."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """Sizes of device memory are rounded up to a multiple of this."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether host memory and device memory are the same: then there is nothing to move."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for reports about problems of the device; usually none."""
        ...

    def current(self) -> Queue:
        """The queue on which this thread computes and allocates now."""
        ...

    @property
    def stage(self) -> Queue:
        """A queue to compute on. The allocator keeps its memory apart from that of others."""
        ...

    def is_capturing(self) -> bool:
        """Whether what is put into the current queue becomes part of a graph, and does not run."""
        ...

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Context in which this thread computes and allocates on `queue`."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """Make an event, not recorded yet. `timed`: it can be used with `seconds`."""
        ...

    def record(self, event: Event, queue: Queue) -> None:
        """Let `event` mark everything put into `queue` so far. An event may be recorded again."""
        ...

    def wait(self, queue: Queue, event: Event) -> None:
        """Let what is put into `queue` from now on begin after `event` as recorded now."""
        ...

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy into `queue`. Both tensors are flat bytes, one of them in host memory."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate flat bytes of device memory, to be used in the order of the current queue."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in device memory. A few ops return scalars on the host."""
        ...

    def share(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Once `tensor` is freed, reuse its memory only after all that is in `queue` by then."""
        ...

    def trim(self) -> None:
        """Release the free device memory that the allocator caches. The host may wait."""
        ...

    def retries(self) -> int:
        """How often the allocator had to release all of that itself, to serve a request."""
        ...

    def host(self, nbytes: int) -> torch.Tensor:
        """Allocate flat bytes of host memory that copies reach at full speed, if possible.

        The caller may drop the tensor while a copy is in progress: the device keeps the memory
        alive.
        """
        ...

    def shrink(self, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` of what `host` returned; the system gets the rest back.

        If the system does not take it, all of the memory is returned. This is faster than to
        allocate anew. Nothing else may use the memory, and no copy may be in progress.
        """
        ...

    def finish(self, queue: Queue) -> None:
        """Let the host wait until `queue` has run everything put into it."""
        ...

    def wait_on_host(self, event: Event) -> None:
        """Let the host wait until `event` is reached.

        Worker threads call this method too, and `record`, `wait` and `copy`.
        """
        ...

    def come(self, event: Event) -> bool:
        """Whether `event` is reached. The host does not wait."""
        ...

    def seconds(self, start: Event, stop: Event) -> float:
        """Time between two recorded timed events. The host waits for them."""
        ...
