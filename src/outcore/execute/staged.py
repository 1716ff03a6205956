"""staged: copy between a device with queues and a disk, by way of host memory.

No queue of the device can reach a file. For a copy out, the device's queue copies to a buffer on
the host, and a worker thread writes the buffer to the disk. A copy in takes the opposite way. Each
direction has two buffers, so that one is filled while the other is emptied. Device memory is free
as soon as its bytes are in the buffer.

A Program leaves out each wait that the order of its streams implies. The queues know nothing of the
half of a copy that a worker does. So each handle knows how many copies to and from the disk come
before it (`handles.DiskCopiesBefore`).

The compute thread waits on the host in two cases: for a copy out if both buffers of that direction
are full, and for a copy in before anything that must come after it, because the worker issues its
second half.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Literal

import torch

from outcore.execute.cpu import CpuLane
from outcore.execute.device import Device, Event
from outcore.execute.disk import FILE_BLOCK_BYTES, MEMORY_ALIGNMENT_BYTES, region_nbytes
from outcore.execute.driver import (
    Direction,
    Lane,
    Region,
    lane_nbytes,
)
from outcore.execute.handles import NOTHING, DiskCopiesBefore, QueuedCopy
from outcore.execute.link import CopyJob, FileRoom, Spill, Throttle
from outcore.execute.link_tables import LinkTables, measure_link
from outcore.execute.slabs import Slabs
from outcore.ir.hardware import STAGING_BUFFERS, staging_bytes

_BUFFERS: Final = STAGING_BUFFERS // 2
"""Buffers per direction."""

_LOST_SECONDS: Final = 1.0
"""After waiting this long for a buffer, check whether one is lost."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class StagingBuffer:
    """Host memory that one copy passes through."""

    memory: torch.Tensor
    """Flat bytes, aligned for direct I/O."""
    busy: Event | None = None
    """The position in a queue after which the memory is free again; None: it is free now."""


class Stages:
    """The buffers of one direction, each of `nbytes`.

    A buffer is lost if the thread that took it was interrupted; it is then replaced.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._free: SimpleQueue[StagingBuffer] = SimpleQueue()
        """Buffers that no copy uses, in the order in which they were given back."""
        self._all: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()
        """Every buffer that still exists."""
        for _ in range(_BUFFERS):
            self._free.put(self._new())

    def take(self) -> StagingBuffer:
        """Take the buffer that was given back first. Waits on the host until there is one."""
        while True:
            try:
                buffer = self._free.get(timeout=_LOST_SECONDS)
                break
            except Empty:
                if len(self._all) < _BUFFERS:
                    return self._new()
        if buffer.busy is not None:
            self.device.wait_on_host(buffer.busy)
            buffer.busy = None
        return buffer

    def give(self, buffer: StagingBuffer, busy: Event | None) -> None:
        """Give `buffer` back. Another copy may use it once `busy` is reached."""
        buffer.busy = busy
        self._free.put(buffer)

    def _new(self) -> StagingBuffer:
        memory = self.device.host(self.nbytes + MEMORY_ALIGNMENT_BYTES)
        start = -memory.data_ptr() % MEMORY_ALIGNMENT_BYTES
        buffer = StagingBuffer(memory[start : start + self.nbytes])
        self._all.add(buffer)
        return buffer


class SpillCopy(CopyJob):
    """The second half of a copy out: from a buffer, once it is filled, to the disk."""

    __slots__ = ("arrived", "buffer", "stages")

    stages: Stages
    buffer: StagingBuffer
    arrived: Event
    """The event after which the buffer is filled."""

    def _move(self, bounce: memoryview, throttle: Throttle) -> None:
        try:
            self.stages.device.wait_on_host(self.arrived)
            super()._move(bounce, throttle)
        finally:
            self.stages.give(self.buffer, self.arrived)

    def _end(self) -> None:
        del self.stages, self.buffer  # lanes keep copies longer than buffers are in use
        super()._end()


class Back(CopyJob):
    """A copy in: from the disk to a buffer, and on to the device by its queue."""

    __slots__ = ("handle", "mark", "stages")

    stages: Stages
    handle: QueuedCopy
    """The handle that the lane returned for this copy."""
    mark: Event
    """The event after which the device memory may be written."""

    def _move(self, bounce: memoryview, throttle: Throttle) -> None:
        room, device, handle = self.lane, self.stages.device, self.handle
        assert room is not None  # noqa: S101 - a copy runs once
        buffer, busy = self.stages.take(), None
        try:
            self.address = buffer.memory.data_ptr()
            super()._move(bounce, throttle)
            busy = handle.event
            device.wait(handle.queue, self.mark)
            assert isinstance(self.kept, torch.Tensor)  # noqa: S101 - set until the copy is done
            device.copy(handle.queue, self.kept, buffer.memory[: len(self.kept)])
            device.record(busy, handle.queue)
            handle.issued = True
            try:
                room.check_open()
            except CancelledError:
                # The thread that closed the lane may have looked before this copy was issued.
                device.wait_on_host(busy)
        finally:
            self.stages.give(buffer, busy)

    def _end(self) -> None:
        del self.stages  # as above
        super()._end()


class StagedLane(FileRoom):
    """The part of a lane on the disk: its regions, its copies and their order."""

    def __init__(self, disk: StagedDisk, regions: Mapping[int, Region]) -> None:
        self._disk, self._largest = disk, max(1, *(place.nbytes for place in regions.values()))
        disk.stages(self._largest)  # now: a step that has begun should not find too little memory
        nbytes = max(FILE_BLOCK_BYTES, lane_nbytes(regions, region_nbytes))
        super().__init__(disk.spill, regions, disk.spill.take(nbytes), nbytes)
        self._lanes = disk.lanes
        self._known = {"out": NOTHING, "in": NOTHING, "compute": NOTHING}
        """Per queue, the disk copies that come before its next command."""
        self._away: list[CopyJob] = []
        """Copies to the disk, in order of issue."""
        self._written: dict[int, CopyJob] = {}
        """Region -> the last copy that was to write it."""
        self._back: list[tuple[CopyJob, QueuedCopy]] = []
        """Copies from the disk with their handles, in order of issue."""
        self._settled = 0
        """How many copies from the disk the host has waited for."""
        self._lanes.add(self)

    def learn(
        self, stream: Literal["out", "in", "compute"], *more: DiskCopiesBefore
    ) -> DiskCopiesBefore:
        """Return which disk copies precede the next command of `stream`, `more` among them.

        Each copy comes after everything computed before it, so it inherits what compute knows.
        """
        known = (self._known[stream], self._known["compute"], *more)
        self._known[stream] = DiskCopiesBefore(*map(max, zip(*known, strict=True)))
        return self._known[stream]

    def settle(self, known: DiskCopiesBefore) -> QueuedCopy | None:
        """Wait on the host until the copies back in `known` are issued; return the last one.

        None if there are none. Raises SpillError if one failed.
        """
        while self._settled < known.back:
            self.wait(self._back[self._settled][0])
            self._settled += 1
        return self._back[known.back - 1][1] if known.back else None

    def stages(self, direction: Direction) -> Stages:
        """The buffers for the next copy in `direction`."""
        return self._disk.stages(self._largest)[direction]

    def away(self, region: int, handle: QueuedCopy, stages: Stages, buffer: StagingBuffer) -> None:
        """Write `buffer`, one of `stages`, to `region` once the copy of `handle` has filled it.

        The copies from the disk that come before it are done: the lane has settled them.
        """
        memory = buffer.memory
        job = SpillCopy(self, "out", region, memory.data_ptr(), memory, ())
        job.stages, job.buffer, job.arrived = stages, buffer, handle.event
        self._spill.put(job)
        self._away.append(job)
        self._written[region] = job
        self._known["out"] = handle.known = handle.known._replace(away=len(self._away))

    def back(self, region: int, handle: QueuedCopy, mark: Event) -> None:
        """Fetch `region` to the device memory of `handle`, which is free once `mark` is reached."""
        memory, before = handle.kept, handle.known.away
        assert memory is not None  # noqa: S101 - nothing has waited for it yet
        after = (self._away[before - 1],) if before else ()
        job = Back(self, "in", region, 0, memory, after)
        job.stages, job.handle, job.mark = self.stages("in"), handle, mark
        job.written = self._written.get(region)
        self._spill.put(job)
        self._back.append((job, handle))
        self._known["in"] = handle.known = handle.known._replace(back=len(self._back))

    def _end(self) -> None:
        """Forget the lane: copies that have not begun find that it is closed."""
        self._lanes.discard(self)


class StagedDisk:
    """A file in `spill_dir`, its workers, and the buffers between the device and the file.

    Raises SpillError if the folder is missing or cannot be written.
    """

    def __init__(self, device: Device, slabs: Slabs, spill_dir: str | os.PathLike[str]) -> None:
        self.device, self.slabs = device, slabs
        self.spill = Spill(spill_dir, None)
        self.lanes: weakref.WeakSet[StagedLane] = weakref.WeakSet()
        """The open lanes. An interrupt can lose a lane before anyone can close it."""
        self._stages: dict[Direction, Stages] = {}
        self._nbytes = 0
        """Size of each current buffer; 0: there are none."""
        self._lock = threading.Lock()

    def stages(self, nbytes: int) -> dict[Direction, Stages]:
        """Return buffers of at least `nbytes` for both directions.

        Larger buffers replace the current ones, also for lanes that are open. Raises
        HostMemoryError if there is no memory for them; the next copy then makes its own anew.
        """
        with self._lock:
            if nbytes > self._nbytes:
                if self._stages:
                    self.spill.drain()  # by then, no copy uses the current ones
                self._replace(nbytes)
            return self._stages

    def _replace(self, nbytes: int) -> None:
        """Free the current buffers, then make and count those of `nbytes`; 0: none."""
        self.slabs.hold(staging_bytes(nbytes) - staging_bytes(self._nbytes))
        self._nbytes, self._stages = 0, {}
        if not nbytes:
            return
        try:
            out, into = (Stages(self.device, nbytes) for _ in range(2))
        except BaseException:
            self.slabs.hold(-staging_bytes(nbytes))
            raise
        self._nbytes, self._stages = nbytes, {"out": out, "in": into}

    def reserve(self, nbytes: int) -> None:
        """Take disk space of `nbytes` now.

        If no lane is open, also drop the buffers of an earlier plan. Raises SpillError if the disk
        is full.
        """
        with self._lock:
            if not self.lanes:
                self._replace(0)
        self.make_room(nbytes)

    def make_room(self, nbytes: int) -> None:
        """Take disk space of `nbytes` now. Raises SpillError if the disk is full."""
        nbytes = region_nbytes(nbytes)
        if nbytes:
            self.spill.file.give(self.spill.take(nbytes), nbytes)

    def measure(self, largest_nbytes: int) -> LinkTables:
        """Measure the link between host memory and the disk alone."""
        return measure_link(_FromMemory(self.spill), largest_nbytes)


class _FromMemory:
    """Opens lanes between host memory and the file."""

    on_copy = None

    def __init__(self, spill: Spill) -> None:
        self.spill = spill

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane of `regions`. Raises SpillError if the disk is full."""
        nbytes = lane_nbytes(regions, region_nbytes)
        return CpuLane(self, self.spill, regions, self.spill.take(nbytes), nbytes)

    def check_resident(self) -> None:
        """Do nothing: nothing is bounded here."""
