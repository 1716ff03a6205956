"""places: where tensors lie that are away from the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.errors import HostMemoryError, SpillError
from outcore.execute import Driver, Lane, Region
from outcore.execute.disk import region_nbytes
from outcore.ir.hardware import Tier, staging_bytes


class Room:
    """A lane for tensors that first went away together. It closes when no place refers to it."""

    __slots__ = ("__weakref__", "lane")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
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
        """Start to copy what is here back to the device."""
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


class OuterTiers:
    """The slower memories that a driver offloads to, the nearest first."""

    def __init__(self, driver: Driver, tiers: Sequence[Tier]) -> None:
        self.driver, self.tiers = driver, tuple(tiers)

    def places(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Places for `tensors` in the nearest tier that has room for all.

        Raises SpillError or HostMemoryError if none has.
        """
        if not tensors:
            return []
        refusal: Exception = HostMemoryError(reason="there is no slower memory", needed_bytes=0)
        for tier in self.tiers:
            try:
                return self._places(tensors, tier)
            except (SpillError, HostMemoryError) as error:
                refusal = error
        raise refusal

    def _places(self, tensors: Sequence[torch.Tensor], tier: Tier) -> list[Place]:
        regions, stop = {}, 0
        for number, tensor in enumerate(tensors):
            regions[number] = Region.of(tensor, stop, tier)
            stop += region_nbytes(regions[number].nbytes)
        if tier is Tier.HOST and Tier.DISK in self.tiers:
            # Copies to the disk pass through host memory: leave room for that.
            needed = stop + staging_bytes(max(region.nbytes for region in regions.values()))
            if not self.driver.has_room({tier: needed}):
                raise HostMemoryError(reason="host_budget is used up", needed_bytes=needed)
        room = Room(self.driver.open_lane(regions))
        return [Place(room, number, region) for number, region in regions.items()]
