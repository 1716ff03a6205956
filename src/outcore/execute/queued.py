"""The driver for devices with queues: three queues, an event per hazard, and no waiting host.

Device memory is taken and given back in the order of the compute queue, which is that of the host.
So each copy waits for the compute queue as it is when the copy is issued: its source is written,
its target is free by then. And the compute queue waits for a copy before the memory at either end
of it is given back or read. Between two copies of different directions the Program says what has
to be waited for.

Host memory of a lane is one slab, of the size that the plan needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import torch

from outcore.errors import VerifyError
from outcore.execute.device import Device, Event, Queue
from outcore.execute.driver import (
    CopySpan,
    Direction,
    EmptyLane,
    Generator,
    Lane,
    Recorder,
    Region,
    fit_link,
    lane_nbytes,
)
from outcore.execute.probe import QueueLinks, measure_queues
from outcore.execute.slabs import Slab, Slabs
from outcore.gauges import Ledger
from outcore.ir.hardware import Hardware, Tier

HOST_ALIGNMENT_BYTES: Final = 512
"""Host offsets are multiples of this: a copy engine is slower with odd addresses."""


class QueuedCopy:
    """A copy under way: the handle of a lane."""

    __slots__ = ("event", "issued", "kept", "queue")

    def __init__(self, queue: Queue, event: Event, kept: torch.Tensor) -> None:
        self.queue, self.event, self.issued = queue, event, False
        self.kept: torch.Tensor | None = kept
        """Keeps the device memory alive until the compute queue has waited for the copy."""


class QueuedLane:
    """One outstanding step (`driver.Lane`)."""

    __slots__ = ("_mark", "_open", "_pending", "compute", "device", "driver", "regions")

    def __init__(self, driver: QueuedDriver, regions: Mapping[int, Region], slab: Slab) -> None:
        self.driver, self.device, self.regions = driver, driver.device, regions
        self.compute = driver.device.current()
        self._mark = driver.device.event()
        self._pending: dict[QueuedCopy, None] = {}
        """Copies that the compute queue has not waited for, oldest first."""
        self._open = [slab]
        """Emptied by `close`: one `pop` succeeds, whichever threads try."""
        if slab.free is not None:
            for queue in (driver.device.out, driver.device.into):
                driver.device.wait(queue, slab.free)

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: QueuedCopy) -> QueuedCopy:
        """Put a copy of the storage of `tensor` to `region` into the queue of that direction."""
        source, nbytes = _bytes_of(tensor), self.regions[region].nbytes
        if len(source) < nbytes:
            rule = "a storage has the bytes of its buffer"
            detail = f"{len(source)} bytes for a region of {nbytes}"
            raise VerifyError(noun="program", rule=rule, where=f"region {region}", detail=detail)
        return self._issue("out", region, source[:nbytes], after)

    def copy_in(self, region: int, /, *after: QueuedCopy) -> tuple[torch.Tensor, QueuedCopy]:
        """Take memory in the order of the compute queue; put the copy that fills it into its."""
        place = self.regions[region]
        memory = self.device.empty(place.nbytes)
        root = torch.empty(0, dtype=place.dtype, device=memory.device)
        root.set_(memory.untyped_storage(), 0, place.shape, place.stride)
        return root, self._issue("in", region, memory, after)

    def wait(self, handle: QueuedCopy, /) -> None:
        """Let the compute queue wait for the copy. The host goes on."""
        self.device.wait(self.compute, handle.event)
        self._pending.pop(handle, None)
        handle.kept = None

    def discard(self, tensor: torch.Tensor, /) -> None:
        """Nothing to do: memory is given back by the last reference."""

    def close(self) -> None:
        """Let the compute queue wait for what is under way, and give the slab back."""
        try:
            slab = self._open.pop()
        except IndexError:
            return
        for handle in list(self._pending):
            if not handle.issued:  # interrupted on the way: perhaps it runs
                self.device.record(handle.event, handle.queue)
            self.wait(handle)
        self.device.record(self._mark, self.compute)
        slab.free = self._mark
        self.driver.slabs.give(slab)

    def _issue(
        self,
        direction: Direction,
        region: int,
        memory: torch.Tensor,
        after: tuple[QueuedCopy, ...],
    ) -> QueuedCopy:
        device, driver = self.device, self.driver
        if not self._open:
            raise RuntimeError("outcore: this step's data was dropped")
        if device.current() != self.compute:
            raise RuntimeError(
                "outcore: one step computes on two streams; call forward and backward on the same"
            )
        queue = device.out if direction == "out" else device.into
        device.record(self._mark, self.compute)
        device.wait(queue, self._mark)
        for earlier in after:
            if earlier.queue is not queue:
                device.wait(queue, earlier.event)
        place = self.regions[region]
        host = self._open[0].memory[place.offset : place.offset + place.nbytes]
        copy = QueuedCopy(queue, device.event(), memory)
        self._pending[copy] = None
        start = driver.timed_event(queue)
        device.copy(queue, *((host, memory) if direction == "out" else (memory, host)))
        device.record(copy.event, queue)
        copy.issued = True
        if start is not None:
            driver.finished(direction, region, start, queue, place.nbytes)
        return copy


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

    def wall_ns(self, moment: tuple[int, Event]) -> int:
        """When the host asked."""
        return moment[0]


class QueuedDriver:
    """A device with queues, and host memory as its outer tier (`driver.Driver`)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.clock = QueueClock(device)
        self.slabs = Slabs(device)
        self.links: QueueLinks | None = None
        """As measured; None until then, and where there is nothing to move."""
        self._recorder: Recorder | None = None
        self._base: tuple[Event, float] | None = None
        self._spans: list[tuple[Direction, int, Event, Event, int]] = []

    @property
    def generator(self) -> Generator:
        """The generator that the device's random ops draw from."""
        generator: Generator = self.device.generator
        return generator

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """This device and the host, with the links between them as measured (under a second)."""
        host = 0 if self.device.shares_memory else budgets.get(Tier.HOST, 0)
        self.slabs.budget_bytes = host
        rounding = (
            (Tier.DEVICE, self.device.rounding_bytes),
            (Tier.HOST, HOST_ALIGNMENT_BYTES),
        )
        capacity = ((Tier.DEVICE, budgets[Tier.DEVICE]), (Tier.HOST, host))
        if not host:
            return Hardware("this-machine", capacity, (), rounding_bytes=rounding)
        largest = min(budgets[Tier.DEVICE] // 16, host // 4)
        self.links = measure_queues(self.device, largest)
        tables = self.links.at_work
        links = (
            (Tier.DEVICE, Tier.HOST, fit_link(tables.copy_out)),
            (Tier.HOST, Tier.DEVICE, fit_link(tables.copy_in)),
        )
        return Hardware("this-machine", capacity, links, tables.duplex, rounding_bytes=rounding)

    def reserve(self, nbytes: int) -> None:
        """Take the host memory of a lane of `nbytes` now, instead of what is not in use.

        Raises HostMemoryError where the budget or the system does not allow it.
        """
        if nbytes:
            self.slabs.make_ready(nbytes)

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """A lane of `regions`. Raises HostMemoryError where there is no memory for one more."""
        nbytes = lane_nbytes(regions, _host_nbytes)
        return QueuedLane(self, regions, self.slabs.take(nbytes)) if nbytes else EmptyLane()

    def record(self, recorder: Recorder | None) -> None:
        """Report every copy from now on to `recorder`, when `drain` is called."""
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
        self, direction: Direction, region: int, start: Event, queue: Queue, nbytes: int
    ) -> None:
        """Note a copy that began at `start` and ends at what is now the end of `queue`."""
        stop = self.device.event(timed=True)
        self.device.record(stop, queue)
        self._spans.append((direction, region, start, stop, nbytes))

    def ledger(self) -> Ledger | None:
        """None: the device's allocator is asked itself."""
        return None

    def bound_memory(self, held_bytes: int, most_bytes: int | None) -> None:
        """Nothing to do: the device's allocator keeps little more than what is in use."""

    def drain(self) -> None:
        """Let the host wait for all copies, and report those that are recorded."""
        for queue in (self.device.out, self.device.into):
            self.device.finish(queue)
        spans, self._spans = self._spans, []
        if self._recorder is None or self._base is None:
            return
        base, zero = self._base
        for direction, region, start, stop, nbytes in spans:
            began = zero + self.device.seconds(base, start)
            ended = zero + self.device.seconds(base, stop)
            self._recorder(CopySpan(direction, region, began, ended, nbytes))

    def close(self) -> None:
        """Wait for the copies and give the host memory back, that of lanes once they are closed."""
        self.drain()
        self.slabs.close()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as flat bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _host_nbytes(nbytes: int) -> int:
    return -(-nbytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
