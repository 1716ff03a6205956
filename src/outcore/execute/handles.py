"""handles: what a lane of a device with queues gives for a copy, and what comes before it."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from outcore.execute.device import Event, Queue
from outcore.execute.driver import Direction


class Known(NamedTuple):
    """How many copies of a lane, to the disk and from it, come before something."""

    away: int = 0
    back: int = 0


NOTHING: Final = Known()


class Over(NamedTuple):
    """How many copies of a lane are over by then: those out, and those in."""

    out: int = 0
    into: int = 0

    def joined(self, other: Over | None) -> Over:
        """What is over after both."""
        if other is None:
            return self
        return Over(max(self.out, other.out), max(self.into, other.into))

    def with_one(self, direction: Direction) -> Over:
        """The same with one copy more in `direction`."""
        more = direction == "out"
        return Over(self.out + more, self.into + (not more))


class QueuedCopy:
    """A copy under way: the handle of a lane."""

    __slots__ = ("direction", "event", "issued", "kept", "known", "over", "queue", "staged")

    def __init__(
        self, direction: Direction, queue: Queue, event: Event, kept: torch.Tensor, known: Known
    ) -> None:
        self.direction, self.queue, self.event, self.known = direction, queue, event, known
        self.over: Over | None = None
        """What is over once this copy is, itself included. None: it is not on its way yet."""
        self.staged = False
        """Whether a worker issues it, once its bytes have come from a disk."""
        self.issued = False
        """Whether `event` is recorded."""
        self.kept: torch.Tensor | None = kept
        """Keeps the device memory alive until the compute queue has waited for the copy."""
