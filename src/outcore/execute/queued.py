"""The driver for devices with queues: one for what is computed, one for copies in each direction.

Host memory of a lane (`lane.py`) is one slab, of the size that the plan needs. What a plan sends to
a disk passes through host memory (`staged.py`).
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
    FORKED,
    CopySpan,
    Direction,
    EmptyLane,
    Generator,
    Lane,
    LinkTable,
    LinkTables,
    Recorder,
    Region,
    fit_link,
    lane_nbytes,
)
from outcore.execute.folders import spill_folder
from outcore.execute.lane import QueuedLane
from outcore.execute.placed import PlacedLane
from outcore.execute.probe import QueueLinks, measure_queues
from outcore.execute.slabs import Slabs
from outcore.execute.staged import StagedDisk, StagedLane
from outcore.gauges import Ledger
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.layout import Layout

DISK_TRIAL_BYTES: Final = 64 << 20
"""The largest copy with which a disk is tried."""

TRIAL_DIVISOR: Final = 64
"""A trial copy is the budget over this; three are live at once, and the rest may be taken."""

LEAST_TRIAL_BYTES: Final = 1 << 20
"""Smaller ones tell little."""

HOST_ALIGNMENT_BYTES: Final = 512
"""Host offsets are multiples of this: a copy engine is slower with odd addresses."""


class QueueClock:
    """Times of a device's compute queue, by events (`gauges.Clock`)."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def now(self) -> tuple[int, Event]:
        """The wall clock, and an event in the current queue."""
        event = self.device.event(timed=True)
        self.device.record(event, self.device.current())
        return time.time_ns(), event

    def seconds(self, start: tuple[int, Event], stop: tuple[int, Event]) -> float:
        """Time of the queue between two events; the host waits for them."""
        return self.device.seconds(start[1], stop[1])

    def come(self, moment: tuple[int, Event]) -> bool:
        """Whether the queue has come to the event."""
        return self.device.come(moment[1])

    def wall_ns(self, moment: tuple[int, Event]) -> int:
        """When the host asked."""
        return moment[0]


class QueuedDriver:
    """A device with queues, and host memory as its outer tier (`driver.Driver`)."""

    def __init__(self, device: Device, spill_dir: str | os.PathLike[str] | None = None) -> None:
        self.device, self.spill_dir = device, spill_dir
        self.clock = QueueClock(device)
        self.slabs = Slabs(device)
        self._disk: StagedDisk | None = None
        self._closed = False
        self._near: Hardware | None = None
        self.links: QueueLinks | None = None
        """As measured; None until then, and where there is nothing to move."""
        self._recorder: Recorder | None = None
        self._base: tuple[Event, float] | None = None
        self._spans: list[tuple[Direction, int, Event, Event, int, int]] = []

    @property
    def generator(self) -> Generator:
        """The generator that the device's random ops draw from."""
        generator: Generator = self.device.generator
        return generator

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """This device and the host, with the links between them as measured (under a second)."""
        host = 0 if self.device.shares_memory else budgets.get(Tier.HOST, 0)
        self.slabs.budget_bytes = host
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

    def _measured(self, largest_nbytes: int) -> QueueLinks:
        """The links; with smaller copies where the device has little left."""
        try:
            return measure_queues(self.device, largest_nbytes)
        except torch.OutOfMemoryError:
            if largest_nbytes < LEAST_TRIAL_BYTES:
                raise
        return self._measured(largest_nbytes // 4)

    def wider_hardware(self, budgets: Mapping[Tier, int], /) -> Hardware | None:
        """The same and the disk; None where there is nothing to move, or no disk in `budgets`.

        Raises SpillError where the disk cannot be used.
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

    def reserve(self, nbytes: Mapping[Tier, int]) -> None:
        """Take the host memory of a lane now, instead of what is not in use, and its disk space.

        Where host memory is not named, what is not in use stays. Raises HostMemoryError where
        the budget or the system does not allow it, SpillError where the disk is full.
        """
        if nbytes.get(Tier.DISK) or self._disk is not None:
            self._staged().reserve(nbytes.get(Tier.DISK, 0))
        if Tier.HOST in nbytes:
            self.slabs.make_ready(nbytes[Tier.HOST])

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """A lane of `regions`. Raises as `reserve` where there is no room for one more."""
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
        lost: Callable[[str], None],
        *,
        holds: bool,
    ) -> PlacedLane:
        """The same for tensors that lie as `layout` says, if it `holds` what is free for them."""
        with self.device.on(self.device.stage) if holds else nullcontext():
            lane = self.open_lane(regions)
        return PlacedLane(lane, self.device, layout, lost, holds=holds)

    def _staged(self) -> StagedDisk:
        folder = self.spill_dir or spill_folder()
        if self._closed:
            raise SpillError(directory=str(folder), reason="the driver is closed")
        if self._disk is None:
            self._disk = StagedDisk(self.device, self.slabs, folder)
            weakref.finalize(self, self._disk.spill.close)
        if self._disk.spill.pid != os.getpid():
            raise StepError(reason=FORKED)
        return self._disk

    def record(self, recorder: Recorder | None) -> None:
        """Report every copy from now on to `recorder`, when `drain` is called.

        Of copies to a disk that is their half to the host, and of copies from one nothing.
        """
        self.drain()
        self._recorder = recorder
        if recorder is not None:
            queue = self.device.current()
            base = self.device.event(timed=True)
            self.device.record(base, queue)
            self.device.finish(queue)
            self._base = base, time.perf_counter()

    def timed_event(self, queue: Queue) -> Event | None:
        """A timed event in `queue`, where somebody records."""
        if self._recorder is None:
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
        """Note a copy that began at `start` and ends at what is now the end of `queue`."""
        stop = self.device.event(timed=True)
        self.device.record(stop, queue)
        self._spans.append((direction, region, start, stop, nbytes, lane))

    def ledger(self) -> Ledger | None:
        """None: the device's allocator is asked itself."""
        return None

    def bound_memory(self, held_bytes: int, most_bytes: int | None) -> None:
        """Give back what the device's allocator keeps: other sizes are wanted from now on.

        Where it may take little more, it would have to give all of it back within a step. Where
        there is no bound, nothing is moved, and it has what it needs.
        """
        del held_bytes  # it keeps to torch's own limits
        if most_bytes is not None:
            self.device.trim()

    def disk_bytes_written(self) -> int:
        """What was written beyond the host so far, to measure the disk included."""
        return 0 if self._disk is None else self._disk.spill.file.written_bytes

    def notes(self) -> tuple[str, ...]:
        """Where host memory could not be locked, say."""
        return self.device.notes

    def drain(self) -> None:
        """Let the host wait for all copies, and report those that are recorded."""
        if self._disk is not None:
            self._disk.spill.drain()
        for queue in (self.device.out, self.device.into):
            self.device.finish(queue)
        spans, self._spans = self._spans, []
        if self._recorder is None or self._base is None:
            return
        base, zero = self._base
        for direction, region, start, stop, nbytes, lane in spans:
            began = zero + self.device.seconds(base, start)
            ended = zero + self.device.seconds(base, stop)
            self._recorder(CopySpan(direction, region, began, ended, nbytes, lane))

    def close(self) -> None:
        """Wait for the copies, and give memory back; that of lanes once they are closed."""
        self.drain()
        self._closed = True
        if self._disk is not None:
            self._disk.spill.close()
        self.slabs.close()
        self.device.trim()


def _host_nbytes(nbytes: int) -> int:
    return -(-nbytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES


def _both_ways(outer: Tier, tables: LinkTables) -> tuple[tuple[Tier, Tier, Link], ...]:
    out, into = fit_link(tables.copy_out), fit_link(tables.copy_in)
    return (Tier.DEVICE, outer, out), (outer, Tier.DEVICE, into)


def _one_after_the_other(queues: LinkTables, disk: LinkTables) -> LinkTables:
    """Copies to the disk by way of the host: each half waits for the other."""

    def both(first: LinkTable, second: LinkTable) -> LinkTable:
        link = fit_link(first)
        return tuple((nbytes, seconds + link.seconds(nbytes)) for nbytes, seconds in second)

    copy_out, copy_in = both(queues.copy_out, disk.copy_out), both(queues.copy_in, disk.copy_in)
    return LinkTables(copy_out, copy_in, disk.duplex)
