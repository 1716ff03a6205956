"""handles: what a lane of a device with queues gives for a copy, and what comes before it."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from outcore.execute.device import Event, Queue


class Known(NamedTuple):
    """How many copies of a lane, to the disk and from it, come before something."""

    away: int = 0
    back: int = 0


NOTHING: Final = Known()


class QueuedCopy:
    """A copy under way: the handle of a lane."""

    __slots__ = ("before", "event", "issued", "kept", "known", "queue", "staged")

    def __init__(self, queue: Queue, event: Event, kept: torch.Tensor, known: Known) -> None:
        self.queue, self.event, self.known = queue, event, known
        self.before: dict[Queue, int] = {}
        """By queue, how many copies of the lane are over once this one is, itself included. Empty
        until it is on its way."""
        self.staged = False
        """Whether a worker issues it, once its bytes have come from a disk."""
        self.issued = False
        """Whether `event` is recorded."""
        self.kept: torch.Tensor | None = kept
        """Keeps the device memory alive until the compute queue has waited for the copy."""
