"""queued: the driver for devices with queues: one queue computes, and one copies in each direction.

A lane (`lane.py`) has one slab of host memory, of the size that the plan needs. What a plan sends
to a disk passes through host memory (`staged.py`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import torch

from outcore.errors import SpillError, StepError
from outcore.execute.device import Device, Event, Queue
from outcore.execute.disk import FILE_BLOCK_BYTES
from outcore.execute.driver import (
    CopySpan,
    Direction,
    EmptyLane,
    Generator,
    Lane,
    OnCopy,
    Region,
    lane_nbytes,
)
from outcore.execute.folders import spill_folder
from outcore.execute.lane import QueuedLane
from outcore.execute.link_tables import LinkTable, LinkTables, fit_link
from outcore.execute.placed import Fate, PlacedLane
from outcore.execute.probe import QueueLinks, measure_queues
from outcore.execute.slabs import Slabs
from outcore.execute.staged import StagedDisk, StagedLane
from outcore.gauges import Ledger, note_refusal
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.layout import Layout

DISK_TRIAL_BYTES: Final = 64 << 20
"""The largest copy that measures a disk."""

TRIAL_DIVISOR: Final = 64
"""The largest copy that measures a link is at most the budget divided by this. Three buffers of
that size are live at once, and the rest of the budget may be in use."""

LEAST_TRIAL_BYTES: Final = 1 << 20
"""Smaller trial copies say little: if one of less than this does not fit, outcore gives up."""

HOST_ALIGNMENT_BYTES: Final = 512
"""Host offsets are multiples of this: a copy engine is slower at odd addresses."""


class QueueClock:
    """Times work in a device's compute queue, by events (`gauges.Clock`)."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def now(self) -> tuple[int, Event]:
        """The wall clock, and an event in the current queue."""
        return self.at(time.time_ns())

    def at(self, wall_ns: int) -> tuple[int, Event]:
        """The given time, and an event in the current queue."""
        event = self.device.event(timed=True)
        self.device.record(event, self.device.current())
        return wall_ns, event

    def seconds(self, start: tuple[int, Event], stop: tuple[int, Event]) -> float:
        """Time between two events in the queue. The host waits for them."""
        return self.device.seconds(start[1], stop[1])

    def come(self, moment: tuple[int, Event]) -> bool:
        """Whether the queue has reached the event."""
        return self.device.come(moment[1])

    def wall_ns(self, moment: tuple[int, Event]) -> int:
        """When the host called `now`, or what it gave to `at`."""
        return moment[0]


class QueuedDriver:
    """A device with queues, with host memory as its outer tier (`driver.Driver`)."""

    def __init__(self, device: Device, spill_dir: str | os.PathLike[str] | None = None) -> None:
        self.device, self.spill_dir = device, spill_dir
        self.clock = QueueClock(device)
        self.slabs = Slabs(device)
        """Host memory for lanes."""
        self._disk: StagedDisk | None = None
        """Made when the disk is first needed."""
        self._disk_budget_bytes: int | None = None
        self._closed = False
        self._bound_bytes: int | None = None
        """The latest bound on device memory."""
        self._retries = 0
        """How often the allocator had emptied its cache when it was last told to."""
        self._near: Hardware | None = None
        """The device and the host, as `hardware` described them last."""
        self.links: QueueLinks | None = None
        """The measured links; None if not measured yet, or if there is nothing to move."""
        self._on_copy: OnCopy | None = None
        """Called with each finished copy; None: copies are not recorded."""
        self._base: tuple[Event, float] | None = None
        """An event and its time by `time.perf_counter`: the times of copies are relative to it."""
        self._spans: list[tuple[Direction, int, Event, Event, int, int]] = []
        """Copies to report: the fields of CopySpan, with events for the times."""

    @property
    def generator(self) -> Generator:
        """The generator that random ops on the device draw from."""
        generator: Generator = self.device.generator
        return generator

    def queue(self) -> object:
        """The queue on which this thread computes."""
        return self.device.current()

    def refuse_capture(self) -> None:
        """Raise StepError if the device's graphs capture what this thread computes.

        A replay would copy through host memory and events that later steps use as well.
        """
        if self.device.is_capturing():
            raise StepError(
                reason="a CUDA graph cannot capture a step that outcore runs: unwrap the model "
                "first, or run the step without torch.cuda.graph"
            )

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """Describe this device and the host, with the links as measured (under a second)."""
        self.limit(budgets)
        host = self._host_bytes(budgets)
        self._near = Hardware(
            name="this-machine",
            capacity_bytes=((Tier.DEVICE, budgets[Tier.DEVICE]), (Tier.HOST, host)),
            links=(),
            rounding_bytes=(
                (Tier.DEVICE, self.device.rounding_bytes),
                (Tier.HOST, HOST_ALIGNMENT_BYTES),
                (Tier.DISK, FILE_BLOCK_BYTES),
            ),
        )
        if host:
            largest = min(budgets[Tier.DEVICE] // TRIAL_DIVISOR, host // 4)
            self.links = self._measured(largest)
            tables = self.links.at_work
            links = _both_ways(Tier.HOST, tables)
            self._near = replace(self._near, links=links, duplex=tables.duplex)
        return self._near

    def limit(self, budgets: Mapping[Tier, int], /) -> None:
        """Let slabs and the file have at most so many bytes."""
        self.slabs.budget_bytes = self._host_bytes(budgets)
        self._disk_budget_bytes = budgets.get(Tier.DISK)

    def _host_bytes(self, budgets: Mapping[Tier, int]) -> int:
        return 0 if self.device.shares_memory else budgets.get(Tier.HOST, 0)

    def _measured(self, largest_nbytes: int) -> QueueLinks:
        """Measure the links, with smaller copies if the device has little memory left."""
        try:
            return measure_queues(self.device, largest_nbytes)
        except torch.OutOfMemoryError:
            if largest_nbytes < LEAST_TRIAL_BYTES:
                raise
            note_refusal()
        return self._measured(largest_nbytes // 4)

    def wider_hardware(self, budgets: Mapping[Tier, int], /) -> Hardware | None:
        """Describe the device, the host and the disk.

        None if there is nothing to move, or if `budgets` has no disk. Raises SpillError if the disk
        cannot be used.
        """
        near = self._near or self.hardware(budgets)
        disk = budgets.get(Tier.DISK, 0)
        if self.links is None or not disk:
            return None
        beyond = self._staged().measure(min(disk // 4, DISK_TRIAL_BYTES))
        tables = _one_after_the_other(self.links.at_work, beyond)
        return replace(
            near,
            capacity_bytes=(*near.capacity_bytes, (Tier.DISK, disk)),
            links=(*near.links, *_both_ways(Tier.DISK, tables)),
        )

    def reserve(self, nbytes: Mapping[Tier, int], *, keep: bool = False) -> None:
        """Take the host memory of a lane now, in place of unused host memory, and its disk space.

        If `nbytes` does not name host memory, or with `keep`, unused host memory stays. Raises
        HostMemoryError if the budget or the system does not allow it, SpillError if the disk is
        full.
        """
        if nbytes.get(Tier.DISK) or self._disk is not None:
            self._staged().reserve(nbytes.get(Tier.DISK, 0))
        if Tier.HOST in nbytes:
            make_ready = self.slabs.make_ready_beside if keep else self.slabs.make_ready
            make_ready(nbytes[Tier.HOST])

    def try_reserve(self, nbytes: Mapping[Tier, int], /) -> bool:
        """Make room for a lane on the disk, and return whether the host has room for it, too.

        Unused host memory stays.
        """
        if nbytes.get(Tier.DISK):
            try:
                self._staged().make_room(nbytes[Tier.DISK])
            except SpillError:
                return False
        return self.slabs.has(nbytes.get(Tier.HOST, 0))

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane of `regions`. Raises as `reserve` does if there is no room for it."""
        if not regions:
            return EmptyLane()
        away = {key: place for key, place in regions.items() if place.tier is Tier.DISK}
        near = {key: place for key, place in regions.items() if key not in away}
        disk = StagedLane(self._staged(), away) if away else None
        try:
            slab = self.slabs.take(lane_nbytes(near, _host_nbytes))
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        return QueuedLane(self, self.device, regions, slab, disk)

    def open_placed_lane(
        self,
        regions: Mapping[int, Region],
        layout: Layout,
        fate: Fate,
        *,
        holds: bool,
    ) -> PlacedLane:
        """Open a lane whose tensors lie as `layout` says.

        `holds`: it holds free memory for them, and computes on a separate stream.
        """
        with self.device.on(self.device.stage) if holds else nullcontext():
            lane = self.open_lane(regions)
        return PlacedLane(lane, self.device, layout, fate, holds=holds)

    def _staged(self) -> StagedDisk:
        """Return the disk and its workers, made if needed.

        Raises SpillError if the driver is closed, and StepError in a forked process.
        """
        folder = self.spill_dir or spill_folder()
        if self._closed:
            raise SpillError(directory=str(folder), reason="the driver is closed")
        if self._disk is None:
            self._disk = StagedDisk(self.device, self.slabs, folder)
            weakref.finalize(self, self._disk.spill.close)
        self._disk.spill.check_process()
        self._disk.spill.file.budget_bytes = self._disk_budget_bytes
        return self._disk

    def record(self, on_copy: OnCopy | None) -> None:
        """Report every copy from now on to `on_copy`, when `drain` is called.

        Of a copy to a disk, only its half to the host is reported; copies from a disk are not.
        """
        self.drain()
        self._on_copy = on_copy
        if on_copy is not None:
            queue = self.device.current()
            base = self.device.event(timed=True)
            self.device.record(base, queue)
            self.device.finish(queue)
            self._base = base, time.perf_counter()

    def timed_event(self, queue: Queue) -> Event | None:
        """Record a timed event in `queue`; None if nothing records copies."""
        if self._on_copy is None:
            return None
        event = self.device.event(timed=True)
        self.device.record(event, queue)
        return event

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
        stop = self.device.event(timed=True)
        self.device.record(stop, queue)
        self._spans.append((direction, region, start, stop, nbytes, lane))

    def ledger(self) -> Ledger | None:
        """Return None: callers read the counters of the device's own allocator instead."""
        return None

    def bound_memory(
        self, held_bytes: Callable[[], int], most_bytes: int | None, *, for_good: bool = True
    ) -> None:
        """If there is a bound, empty the allocator's cache: later requests have other sizes.

        If the allocator could get little more memory, it would otherwise have to empty its cache
        within a step. Without a bound, nothing is moved, and the allocator has what it needs. If
        the bound is not for good, the sizes may not return: then the cache stays, unless the last
        bound was another one, or the allocator had to empty the cache itself since.
        """
        del held_bytes  # the allocator has torch's own limits
        if most_bytes is None:
            return
        before, self._bound_bytes = self._bound_bytes, most_bytes
        if for_good or most_bytes != before or self.device.retries() != self._retries:
            self.device.trim()
            self._retries = self.device.retries()

    def disk_bytes_written(self) -> int:
        """Bytes written to a disk so far, including those that measured it."""
        return 0 if self._disk is None else self._disk.spill.file.written_bytes

    def notes(self) -> tuple[str, ...]:
        """Notes for reports, such as that host memory could not be locked."""
        return self.device.notes

    def drain(self) -> None:
        """Let the host wait for all copies, and report those that were recorded."""
        if self._disk is not None:
            self._disk.spill.drain()
        for queue in (self.device.out, self.device.into):
            self.device.finish(queue)
        spans, self._spans = self._spans, []
        if self._on_copy is None or self._base is None:
            return
        base, zero = self._base
        for direction, region, start, stop, nbytes, lane in spans:
            began = zero + self.device.seconds(base, start)
            ended = zero + self.device.seconds(base, stop)
            self._on_copy(CopySpan(direction, region, began, ended, nbytes, lane))

    def close(self) -> None:
        """Wait for the copies and release memory; that of lanes when they are closed."""
        self.drain()
        self._closed = True
        if self._disk is not None:
            self._disk.spill.close()
        self.slabs.close()
        self.device.trim()


def _host_nbytes(nbytes: int) -> int:
    """`nbytes`, rounded up to the alignment of host offsets."""
    return -(-nbytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


def _both_ways(outer: Tier, tables: LinkTables) -> tuple[tuple[Tier, Tier, Link], ...]:
    """Fit the links between the device and `outer`, in both directions."""
    out, into = fit_link(tables.copy_out), fit_link(tables.copy_in)
    return (Tier.DEVICE, outer, out), (outer, Tier.DEVICE, into)


def _one_after_the_other(queues: LinkTables, disk: LinkTables) -> LinkTables:
    """Times of copies to the disk by way of the host: the second half waits for the first."""

    def both(first: LinkTable, second: LinkTable) -> LinkTable:
        link = fit_link(first)
        return tuple((nbytes, seconds + link.seconds(nbytes)) for nbytes, seconds in second)

    copy_out, copy_in = both(queues.copy_out, disk.copy_out), both(queues.copy_in, disk.copy_in)
    return LinkTables(copy_out, copy_in, disk.duplex)
