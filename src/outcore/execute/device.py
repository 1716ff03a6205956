"""What a driver with queues asks of a device that works in queues: commands, events, memory.

A queue runs what is put into it in order, beside all other queues and beside the host, which never
waits. An event marks a place in a queue; another queue that waits for it goes on once the first
has come there. Everything that orders two queues passes through here, so that a device of tests can
check that nothing is left out (`tests/cpu/queues.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

Queue: TypeAlias = Any
"""A queue of the device; opaque to all but the device."""

Event: TypeAlias = Any
"""A place in a queue, once recorded; opaque to all but the device."""


class Device(Protocol):
    """A device, its two queues for copies, and whatever queue computes at the moment."""

    @property
    def out(self) -> Queue:
        """The queue for copies away from the device."""
        ...

    @property
    def into(self) -> Queue:
        """The queue for copies back."""
        ...

    @property
    def generator(self) -> Any:
        """The generator that the device's random ops draw from (`driver.Generator`)."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """Device memory is taken in multiples of this."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether the host's memory is the device's: then there is nothing to move."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What reports should tell of how it fares; as a rule, nothing."""
        ...

    def current(self) -> Queue:
        """The queue that this thread computes on, and takes memory on."""
        ...

    @property
    def stage(self) -> Queue:
        """A queue to compute on whose memory is kept apart from that of others."""
        ...

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Within it, this thread computes on `queue`, and takes memory on it."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """An event, not recorded yet; `timed`: for `seconds`."""
        ...

    def record(self, event: Event, queue: Queue) -> None:
        """Let `event` mark what was put into `queue` so far. May be done again."""
        ...

    def wait(self, queue: Queue, event: Event) -> None:
        """What is put into `queue` from now on begins once `event`, as it is now, has come."""
        ...

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy between two flat tensors of bytes, one of them on the host, into `queue`."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Flat bytes of device memory, free for use in the order of the current queue."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in device memory; ops give a few scalars on the host instead."""
        ...

    def share(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Once `tensor` is gone, let its memory wait for what was put into `queue` by then."""
        ...

    def trim(self) -> None:
        """Give back device memory that is kept for tensors to come. The host may wait."""
        ...

    def host(self, nbytes: int) -> torch.Tensor:
        """Flat bytes of host memory that copies reach at full speed, where the system allows.

        They may be dropped with a copy under way: the device sees to it that they last so long.
        """
        ...

    def shrink(self, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of what `host` gave; the rest goes back to the system, or all stays.

        Faster than other memory would be. Nobody else may use it, nor a copy be under way.
        """
        ...

    def finish(self, queue: Queue) -> None:
        """Let the host wait until `queue` has run all that was put into it."""
        ...

    def attend(self, event: Event) -> None:
        """Let the host wait until `event` has come.

        Worker threads call this, `record`, `wait` and `copy` too.
        """
        ...

    def come(self, event: Event) -> bool:
        """Whether `event` has come. The host does not wait."""
        ...

    def seconds(self, start: Event, stop: Event) -> float:
        """Time between two timed events that were recorded; the host waits for them."""
        ...
