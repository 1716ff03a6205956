"""probe: measure how fast a device with queues copies: alone, both ways, and while computing."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeAlias

import torch

from outcore.execute.device import Device, Event, Queue
from outcore.execute.link_tables import LinkTable, LinkTables

_NBYTES = tuple(1 << shift for shift in range(16, 29, 2))
"""The sizes to try: 64 KiB to 256 MiB, each four times the previous one."""
_REPEATS = 5
_LEAST_SECONDS = 1e-6
_MOST_WORK = 1000
"""The most commands of work issued at once."""

_Span: TypeAlias = tuple[Event, Event]
"""The timed events at which a copy starts and stops."""


class QueueLinks(NamedTuple):
    """The measured links of a device with queues."""

    alone: LinkTables
    """Times of copies while the device does not compute."""
    busy_out: float
    """Rate of copies out while the device computes, as a fraction of the rate alone; at most 1."""
    busy_in: float
    """Rate of copies in while the device computes, as a fraction of the rate alone; at most 1."""

    @property
    def at_work(self) -> LinkTables:
        """The times within a step, whose copies run concurrently with its ops."""
        copy_out, copy_in, duplex = self.alone
        return LinkTables(_slower(copy_out, self.busy_out), _slower(copy_in, self.busy_in), duplex)


def measure_queues(device: Device, largest_nbytes: int) -> QueueLinks:
    """Time copies of 64 KiB to 256 MiB, or to `largest_nbytes`, in both directions.

    Times are measured by events in the queues. Needs three times the largest size of device memory,
    and twice of host memory.
    """
    sizes = [n for n in _NBYTES if n <= largest_nbytes] or [_NBYTES[0]]
    away, back = (device.host(sizes[-1]) for _ in range(2))
    source, target, scratch = (device.empty(sizes[-1]) for _ in range(3))

    def out(nbytes: int) -> Callable[[], _Span]:
        return lambda: _copy(device, device.out, away[:nbytes], source[:nbytes])

    def into(nbytes: int) -> Callable[[], _Span]:
        return lambda: _copy(device, device.into, target[:nbytes], back[:nbytes])

    copy_out = tuple((n, _seconds(device, out(n))[0]) for n in sizes)
    copy_in = tuple((n, _seconds(device, into(n))[0]) for n in sizes)
    alone = copy_out[-1][1], copy_in[-1][1]
    together = _seconds(device, out(sizes[-1]), into(sizes[-1]))
    # The threshold is halfway between perfect overlap (the slower copy) and none (the sum).
    duplex = max(together) < (max(alone) + sum(alone)) / 2
    compute = _Compute(device, scratch)
    work = compute.lasting(sum(alone))
    busy = [_seconds(device, copy, then=work)[0] for copy in (out(sizes[-1]), into(sizes[-1]))]
    pairs = zip(alone, busy, strict=True)
    ratios = (min(1.0, before / now) if before and now else 1.0 for before, now in pairs)
    return QueueLinks(LinkTables(copy_out, copy_in, duplex), *ratios)


class _Compute:
    """Work for the compute queue that only keeps the device's memory busy."""

    def __init__(self, device: Device, scratch: torch.Tensor) -> None:
        self.device, self.scratch = device, scratch

    def lasting(self, seconds: float) -> Callable[[], None]:
        """Return a function that issues about `seconds` of work."""
        start, stop = (self.device.event(timed=True) for _ in range(2))
        queue = self.device.current()
        self._once()
        self.device.record(start, queue)
        self._once()
        self.device.record(stop, queue)
        each = max(self.device.seconds(start, stop), _LEAST_SECONDS)
        count = min(math.ceil(seconds / each), _MOST_WORK)

        def work() -> None:
            for _ in range(count):
                self._once()

        return work

    def _once(self) -> None:
        self.scratch.bitwise_not_()


def _copy(device: Device, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> _Span:
    """Put a copy that is timed into `queue`, after what is in the compute queue."""
    ready, start, stop = device.event(), device.event(timed=True), device.event(timed=True)
    device.record(ready, device.current())
    device.wait(queue, ready)
    device.record(start, queue)
    device.copy(queue, target, source)
    device.record(stop, queue)
    return start, stop


def _seconds(
    device: Device, *copies: Callable[[], _Span], then: Callable[[], None] | None = None
) -> list[float]:
    """Median seconds of each copy. All copies are issued at once, and `then` after them.

    The first turn is a warm-up.
    """
    times: list[list[float]] = [[] for _ in copies]
    for turn in range(_REPEATS + 1):
        spans = [copy() for copy in copies]
        if then is not None:
            then()
        for queue in (device.out, device.into):
            device.finish(queue)
        for taken, (start, stop) in zip(times, spans, strict=True):
            if turn:
                taken.append(device.seconds(start, stop))
    return [median(taken) for taken in times]


def _slower(table: LinkTable, ratio: float) -> LinkTable:
    """The table for copies at `ratio` of their rate."""
    return tuple((nbytes, seconds / ratio) for nbytes, seconds in table)
