"""places: where tensors lie that are away from the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.errors import StepError
from outcore.execute import Driver, Lane, Region
from outcore.execute.disk import region_nbytes
from outcore.ir.hardware import Tier

ANOTHER_QUEUE = (
    "the state of an optimizer is offloaded on one CUDA stream and used on another; call "
    "offload_optimizer, the optimizer's step and what reads its state on the same stream"
)


class Outer:
    """The slower memory that a driver offloads to, for the state of one optimizer."""

    def __init__(self, driver: Driver, tier: Tier) -> None:
        self.driver, self.tier = driver, tier
        self._queue = driver.queue()

    def check(self) -> None:
        """Raise StepError if this thread computes on another queue, or captures a CUDA graph."""
        if self.driver.queue() != self._queue:
            raise StepError(reason=ANOTHER_QUEUE)
        self.driver.refuse_capture()

    def places(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Places for `tensors`.

        Raises SpillError or HostMemoryError if there is no room for all.
        """
        regions, stop = {}, 0
        for number, tensor in enumerate(tensors):
            regions[number] = Region.of(tensor, stop, self.tier)
            stop += region_nbytes(regions[number].nbytes)
        room = Room(self, self.driver.open_lane(regions))
        return [Place(room, number, region) for number, region in regions.items()]


class Room:
    """A lane for tensors that first went away together. It closes when no place refers to it."""

    __slots__ = ("__weakref__", "lane", "outer")

    def __init__(self, outer: Outer, lane: Lane) -> None:
        self.outer, self.lane = outer, lane
        weakref.finalize(self, lane.close).atexit = False  # by then the driver is closed


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A part of a room, for one tensor."""

    room: Room
    number: int
    """The key of its region."""
    region: Region

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is as the one that it was made for."""
        here = self.region
        return Region.of(tensor, here.offset, here.tier) == here

    def write(self, tensor: torch.Tensor) -> Copy:
        """Start to copy `tensor` here."""
        return Copy(self, tensor, self.room.lane.copy_out(tensor, self.number))

    def read(self) -> Copy:
        """Start to copy what is here back to the device. Raises StepError as `Outer.check` does."""
        self.room.outer.check()
        with torch.inference_mode(mode=False):  # a step could not change what a reader made in it
            tensor, handle = self.room.lane.copy_in(self.number)
        return Copy(self, tensor, handle)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy between a place and a tensor on the device."""

    place: Place
    tensor: torch.Tensor
    handle: Any

    def finish(self) -> torch.Tensor:
        """Wait for the copy, as a lane does. Raises SpillError if it failed."""
        self.place.room.lane.wait(self.handle)
        return self.tensor
