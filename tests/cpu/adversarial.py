"""adversarial: a driver for tests that is as unhelpful as the rules allow.

A copy happens only once something waits for it: directly, by way of `after`, or through a later
copy of its direction. So copies happen as late as possible, and in an order between the directions
that no real device has. Memory without a value, before or after, holds poison: all bits set, which
is NaN in every float and -1 in every signed integer. A program that misses a wait computes wrong
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from outcore.execute.driver import CopySpan, Direction, Lane, OnCopy, Region, lane_nbytes
from outcore.gauges import Ledger, WallClock
from outcore.ir.hardware import Hardware, Link, Tier

POISON = 0xFF
"""Every byte of memory without a value."""


class LateCopy:
    """A copy that was issued."""

    __slots__ = ("after", "direction", "pending", "region", "storage")

    def __init__(
        self, direction: Direction, region: int, storage: torch.Tensor, after: tuple[LateCopy, ...]
    ) -> None:
        self.direction, self.region, self.storage, self.after = direction, region, storage, after
        """`after`: copies that must happen first."""
        self.pending = True
        """Whether the copy has not happened yet."""


class AdversarialLane:
    """A lane whose outer tier is memory, built to expose missing waits (`driver.Lane`)."""

    def __init__(self, driver: AdversarialDriver, regions: Mapping[int, Region]) -> None:
        self.driver, self.regions = driver, regions
        nbytes = lane_nbytes(regions, int)
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
        """The lane's outer memory."""
        self.issued: list[LateCopy] = []
        """Copies that have not happened yet, in order of issue."""

    @property
    def key(self) -> int:
        """What `CopySpan.lane` says of this lane."""
        return id(self)

    def copy_out(self, tensor: torch.Tensor, region: int, *after: LateCopy) -> LateCopy:
        """Promise to copy the storage of `tensor` to `region`."""
        return self._issue(LateCopy("out", region, _bytes_of(tensor), after))

    def copy_in(self, region: int, *after: LateCopy) -> tuple[torch.Tensor, LateCopy]:
        """Return the root tensor of `region`, poisoned, and a promise to fill it."""
        place = self.regions[region]
        storage = torch.full((place.nbytes,), POISON, dtype=torch.uint8, device="cpu")
        tensor = torch.empty(0, dtype=place.dtype, device="cpu")
        tensor.set_(storage.untyped_storage(), place.start, place.shape, place.stride)
        return tensor, self._issue(LateCopy("in", region, storage, after))

    def wait(self, handle: LateCopy) -> None:
        """Do the copy now, preceded only by what must come before it."""
        while handle.pending:
            self._do(self._first(handle))

    def discard(self, tensor: torch.Tensor) -> None:
        """Poison the whole storage of `tensor`."""
        _bytes_of(tensor).fill_(POISON)

    def release(self, region: int) -> None:
        """Poison `region`, which will not be copied in again.

        Earlier copies in must have been waited for.
        """
        self._place(region).fill_(POISON)

    def close(self) -> None:
        """Do the remaining copies, the latest first as far as the order allows."""
        while self.issued:
            self.wait(self.issued[-1])
        if self in self.driver.lanes:
            self.driver.lanes.remove(self)

    def _issue(self, copy: LateCopy) -> LateCopy:
        self.issued.append(copy)
        return copy

    def _first(self, copy: LateCopy) -> LateCopy:
        """Return the copy to do next so that `copy` can be done, possibly `copy` itself."""
        while True:
            before = [c for c in copy.after if c.pending]
            if self.driver.stream_order:
                queue = [c for c in self.issued if c.direction == copy.direction]
                before += queue[: queue.index(copy)]
            if not before:
                return copy
            copy = before[-1]

    def _do(self, copy: LateCopy) -> None:
        """Do one copy now, and report it."""
        self.issued.remove(copy)
        copy.pending = False
        place = self._place(copy.region)
        memory = copy.storage[: len(place)]
        source, target = (memory, place) if copy.direction == "out" else (place, memory)
        target.copy_(source)
        if self.driver.on_copy is not None:
            span = CopySpan(copy.direction, copy.region, 0.0, 0.0, len(place), self.key)
            self.driver.on_copy(span)

    def _place(self, region: int) -> torch.Tensor:
        """The bytes of `region`."""
        place = self.regions[region]
        return self.memory[place.offset : place.offset + place.nbytes]


class AdversarialDriver:
    """A driver whose outer tier is memory, and whose copies happen late (`driver.Driver`).

    `stream_order`: copies of one direction happen in the order of issue, as real drivers promise.
    Without it, only `after` and `wait` order copies.
    """

    def __init__(self, *, stream_order: bool = True) -> None:
        self.stream_order = stream_order
        self.generator = torch.default_generator
        self.clock = WallClock()
        self.on_copy: OnCopy | None = None
        self.lanes: list[AdversarialLane] = []
        """Those that are open."""

    def refuse_capture(self) -> None:
        pass

    def queue(self) -> object:
        """Return None: work is done as it is given."""
        return None

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """Describe a machine with made-up links, the same every time."""
        link = Link(bytes_per_second=float(1 << 30), latency_seconds=1e-4)
        return Hardware(
            name="adversarial",
            capacity_bytes=((Tier.DEVICE, budgets[Tier.DEVICE]), (Tier.DISK, budgets[Tier.DISK])),
            links=((Tier.DEVICE, Tier.DISK, link), (Tier.DISK, Tier.DEVICE, link)),
        )

    def wider_hardware(self, _budgets: Mapping[Tier, int]) -> Hardware | None:
        """Return None: there is no tier behind the disk."""
        return None

    def limit(self, budgets: Mapping[Tier, int], /) -> None:
        """Do nothing."""

    def reserve(self, nbytes: Mapping[Tier, int], *, keep: bool = False) -> None:
        """Do nothing."""

    def try_reserve(self, _: Mapping[Tier, int], /) -> bool:
        """Return True: there is always room."""
        return True

    def ledger(self) -> Ledger | None:
        """Return None: it has no allocator."""
        return None

    def bound_memory(
        self, held_bytes: Callable[[], int], most_bytes: int | None, *, for_good: bool = True
    ) -> None:
        """Do nothing."""

    def disk_bytes_written(self) -> int:
        """Return 0: what stands for the disk is memory."""
        return 0

    def notes(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane whose memory is poisoned."""
        self.lanes.append(AdversarialLane(self, regions))
        return self.lanes[-1]

    def record(self, on_copy: OnCopy | None) -> None:
        """Report every copy from now on, without times."""
        self.on_copy = on_copy

    def drain(self) -> None:
        """Do the promised copies of every lane, the latest lane first."""
        for lane in reversed(self.lanes):
            while lane.issued:
                lane.wait(lane.issued[-1])

    def close(self) -> None:
        """Close every lane."""
        while self.lanes:
            self.lanes[-1].close()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of `tensor` as bytes."""
    view = torch.empty(0, dtype=torch.uint8, device="cpu")
    return view.set_(tensor.untyped_storage())
