"""handles: the handles of copies on a device with queues, and what precedes each copy."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from outcore.execute.device import Event, Queue
from outcore.execute.driver import Direction


class DiskCopiesBefore(NamedTuple):
    """How many copies of a lane to a disk (`away`) and from it (`back`) come before some point.

    A vector clock: the queues of the device do not order what worker threads do.
    """

    away: int = 0
    back: int = 0


NOTHING: Final = DiskCopiesBefore()


class Completed(NamedTuple):
    """How many copies of a lane are complete at some point, per direction."""

    out: int = 0
    into: int = 0

    def joined(self, other: Completed | None) -> Completed:
        """What is complete once both points are reached."""
        if other is None:
            return self
        return Completed(max(self.out, other.out), max(self.into, other.into))

    def with_one(self, direction: Direction) -> Completed:
        """The same with one more copy in `direction`."""
        more = direction == "out"
        return Completed(self.out + more, self.into + (not more))


class QueuedCopy:
    """A copy in progress: the handle that a lane returns."""

    __slots__ = ("direction", "event", "issued", "kept", "known", "over", "queue", "staged")

    def __init__(
        self,
        direction: Direction,
        queue: Queue,
        event: Event,
        kept: torch.Tensor,
        known: DiskCopiesBefore,
    ) -> None:
        self.direction, self.queue, self.event, self.known = direction, queue, event, known
        """`event` marks the end of the copy in `queue`; `known`: the disk copies that come before
        it."""
        self.over: Completed | None = None
        """What is complete once this copy is, itself included. None: the copy is not issued
        completely."""
        self.staged = False
        """Whether a worker thread issues it, once its bytes have been read from the disk."""
        self.issued = False
        """Whether `event` is recorded."""
        self.kept: torch.Tensor | None = kept
        """Keeps the device memory alive until the compute queue has waited for the copy."""
