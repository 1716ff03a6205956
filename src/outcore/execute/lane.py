"""lane: the copies of one outstanding step on a device with queues, each with the events it needs.

Device memory is allocated and freed in the order of the compute queue, which is the order in which
the host issues commands. So a copy waits for everything in the compute queue when the copy is
issued: by then its source is written and its target is free. The compute queue waits for a copy
before the memory at either end of the copy is freed or read. Between copies of different
directions, the Program says what to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Protocol

import torch

from outcore.errors import StepError, VerifyError
from outcore.execute.device import Device, Event, Queue
from outcore.execute.driver import Direction, Region
from outcore.execute.handles import NOTHING, Completed, QueuedCopy
from outcore.execute.slabs import Slab, Slabs
from outcore.execute.staged import StagedLane
from outcore.ir.hardware import Tier


class LaneDriver(Protocol):
    """The part of a driver that a lane needs: slabs, and whether copies are timed."""

    @property
    def slabs(self) -> Slabs:
        """Where the lane gives its slab back to."""
        ...

    def timed_event(self, queue: Queue) -> Event | None:
        """Record a timed event in `queue`; None if nothing records copies."""
        ...

    def finished(
        self,
        direction: Direction,
        region: int,
        start: Event,
        queue: Queue,
        nbytes: int,
        lane: int,
    ) -> None:
        """Note a copy that began at `start` and ends at the current end of `queue`."""
        ...


class QueuedLane:
    """One outstanding step on a device with queues (`driver.Lane`)."""

    __slots__ = (
        "_disk",
        "_last",
        "_mark",
        "_open",
        "_over",
        "_pending",
        "_strays",
        "compute",
        "device",
        "driver",
        "regions",
    )

    def __init__(
        self,
        driver: LaneDriver,
        device: Device,
        regions: Mapping[int, Region],
        slab: Slab,
        disk: StagedLane | None = None,
    ) -> None:
        self.driver, self.device, self.regions = driver, device, regions
        self.compute = device.current()
        """The queue on which the step computes, in both calls."""
        self._disk = disk
        """The part of the lane on a disk; None if no region is there."""
        self._mark = device.event()
        """An event for positions in the compute queue, recorded again each time."""
        self._pending: dict[Direction, deque[QueuedCopy]] = {"out": deque(), "in": deque()}
        """Copies that the compute queue has not waited for, oldest first."""
        self._last: dict[Direction, Completed] = {"out": Completed(), "in": Completed()}
        """What is complete once the last copy in a direction is."""
        self._over = Completed()
        """What is complete before the next command of the compute queue."""
        self._strays: dict[int, torch.Tensor] = {}
        """Region -> a tensor that is not copied there, because its op returned it on the host."""
        self._open = [slab]
        """The lane's slab until `close` pops it. Only one `pop` succeeds, whichever threads try."""
        if slab.free is not None:
            for queue in (device.out, device.into):
                device.wait(queue, slab.free)

    @property
    def key(self) -> int:
        """What `CopySpan.lane` says of this lane."""
        return id(self)

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: QueuedCopy) -> QueuedCopy:
        """Put a copy of the storage of `tensor` to `region` into the queue for copies out."""
        source, nbytes = _bytes_of(tensor), self.regions[region].nbytes
        if len(source) < nbytes:
            rule = "a storage has the bytes of its buffer"
            detail = f"{len(source)} bytes for a region of {nbytes}"
            raise VerifyError(noun="program", rule=rule, where=f"region {region}", detail=detail)
        self._check()
        if not self.device.holds(tensor):
            self._strays[region] = tensor
            return self._skipped_copy("out", tensor, after)
        self._strays.pop(region, None)
        return self._issue("out", region, source[:nbytes], after)

    def copy_in(self, region: int, /, *after: QueuedCopy) -> tuple[torch.Tensor, QueuedCopy]:
        """Allocate in the order of the compute queue; put the copy into the queue for copies in."""
        self._check()
        place, stray = self.regions[region], self._strays.get(region)
        memory = self.device.empty(place.nbytes) if stray is None else stray
        root = torch.empty(0, dtype=place.dtype, device=memory.device)
        root.set_(memory.untyped_storage(), place.start, place.shape, place.stride)
        if stray is not None:
            return root, self._skipped_copy("in", stray, after)
        return root, self._issue("in", region, memory, after)

    def wait(self, handle: QueuedCopy, /) -> None:
        """Let the compute queue wait for the copy, and for all copies that precede it.

        Their device memory may be reused after that. The host continues, unless a copy from a disk
        is among them: then it waits until a worker has issued that copy. Raises SpillError if the
        copy failed.
        """
        self._order(self.compute, handle)
        if self._disk is not None:
            self._disk.learn("compute", handle.known)
        # A program leaves out each wait that this one implies, so the preceding copies are
        # complete, too.
        self._over = self._over.joined(handle.over)
        for place, copies in enumerate(self._pending.values()):
            while copies and (over := copies[0].over) and over[place] <= self._over[place]:
                copies[0].kept = None
                copies.popleft()

    def discard(self, tensor: torch.Tensor, /) -> None:
        """Do nothing: memory is freed with its last reference."""

    def close(self) -> None:
        """Let the compute queue wait for copies in progress, and give the slab back."""
        try:
            slab = self._open.pop()
        except IndexError:
            return
        self._strays.clear()
        if self._disk is not None:
            # Close the disk's part first. A worker that issues a copy after this waits for the copy
            # itself.
            self._disk.close()
        for handle in chain(*self._pending.values()):
            if not (handle.issued or handle.staged):  # interrupted while issued; it may run
                self.device.record(handle.event, handle.queue)
                handle.issued = True
            if handle.issued:
                self.device.wait(self.compute, handle.event)
            handle.kept = None
        for copies in self._pending.values():
            copies.clear()
        self.device.record(self._mark, self.compute)
        slab.free = self._mark
        self.driver.slabs.give(slab)

    def _check(self) -> None:
        """Raise StepError if the lane is closed, or if this thread computes on another queue."""
        if not self._open:
            raise StepError(reason="the saved data of this step was freed")
        if self.device.current() != self.compute:
            reason = (
                "one step runs on two CUDA streams; call forward and backward on the same stream"
            )
            raise StepError(reason=reason)

    def _skipped_copy(
        self, direction: Direction, tensor: torch.Tensor, after: tuple[QueuedCopy, ...]
    ) -> QueuedCopy:
        """Make the handle of a copy that is not needed.

        The handle has its place in the queue of that direction, so waiting for it also covers all
        copies before it.
        """
        copy = self._ordered(direction, tensor, after)
        self._mark_compute(copy.queue)
        self.device.record(copy.event, copy.queue)
        copy.issued = True
        self._count(copy, after)
        return copy

    def _issue(
        self,
        direction: Direction,
        region: int,
        memory: torch.Tensor,
        after: tuple[QueuedCopy, ...],
    ) -> QueuedCopy:
        """Issue a copy between device memory and `region`, which is on the host or a disk."""
        copy = self._ordered(direction, memory, after)
        place = self.regions[region]
        if place.tier is not Tier.DISK:
            self._mark_compute(copy.queue)
            host = self._open[0].memory[place.offset : place.offset + place.nbytes]
            self._put(copy, direction, region, host)
        else:
            assert self._disk is not None  # noqa: S101 - it has this region
            self._stage(self._disk, copy, direction, region)
        self._count(copy, after)
        return copy

    def _ordered(
        self, direction: Direction, memory: torch.Tensor, after: tuple[QueuedCopy, ...]
    ) -> QueuedCopy:
        """Make a copy that is not issued yet; its queue waits for `after`."""
        queue = self.device.out if direction == "out" else self.device.into
        for earlier in after:
            if earlier.queue is not queue:
                self._order(queue, earlier)
        known = NOTHING
        if self._disk is not None:
            known = self._disk.learn(direction, *(earlier.known for earlier in after))
        copy = QueuedCopy(direction, queue, self.device.event(), memory, known)
        self._pending[direction].append(copy)
        return copy

    def _mark_compute(self, queue: Queue) -> None:
        """Let `queue` wait for everything in the compute queue so far."""
        self.device.record(self._mark, self.compute)
        self.device.wait(queue, self._mark)

    def _count(self, copy: QueuedCopy, after: tuple[QueuedCopy, ...]) -> None:
        """Note what is complete once `copy` is.

        If an interrupt comes earlier, `close` handles the copy.
        """
        over = self._last[copy.direction].joined(self._over)
        for earlier in after:
            over = over.joined(earlier.over)
        copy.over = self._last[copy.direction] = over.with_one(copy.direction)

    def _stage(self, disk: StagedLane, copy: QueuedCopy, direction: Direction, region: int) -> None:
        """Issue a copy to or from the disk."""
        mark = self.device.event()  # not `_mark`: a worker may wait for it later
        self.device.record(mark, self.compute)
        if direction == "in":
            copy.staged = True
            disk.back(region, copy, mark)
            return
        self.device.wait(copy.queue, mark)
        stages = disk.stages("out")
        buffer = stages.take()
        self._put(copy, direction, region, buffer.memory[: self.regions[region].nbytes])
        disk.away(region, copy, stages, buffer)

    def _put(self, copy: QueuedCopy, direction: Direction, region: int, host: torch.Tensor) -> None:
        """Put the copy between device memory and `host` into its queue."""
        device, driver, queue, memory = self.device, self.driver, copy.queue, copy.kept
        assert memory is not None  # noqa: S101 - nothing has waited for it yet
        start = driver.timed_event(queue)
        device.copy(queue, *((host, memory) if direction == "out" else (memory, host)))
        device.record(copy.event, queue)
        copy.issued = True
        if start is not None:
            nbytes = self.regions[region].nbytes
            driver.finished(direction, region, start, queue, nbytes, self.key)

    def _order(self, queue: Queue, handle: QueuedCopy) -> None:
        """Let `queue` wait for `handle` and all copies that precede it."""
        if self._disk is not None:
            last = self._disk.settle(handle.known)
            if last is not None:
                self.device.wait(queue, last.event)
        self.device.wait(queue, handle.event)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as flat bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
