"""probe: how fast a device with queues copies, alone and in both directions at once."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypeAlias

import torch

from outcore.execute.device import Device, Event, Queue
from outcore.execute.driver import LinkTables

_NBYTES = tuple(1 << shift for shift in range(16, 29, 2))
_REPEATS = 5

_Span: TypeAlias = tuple[Event, Event]


def measure_queues(device: Device, largest_nbytes: int) -> LinkTables:
    """Time copies of 64 KiB to 256 MiB, or to `largest_nbytes`, in both directions.

    By events in the queues; takes twice the largest size of device memory, and of the host's.
    """
    sizes = [n for n in _NBYTES if n <= largest_nbytes] or [_NBYTES[0]]
    away, back = (device.host(sizes[-1]) for _ in range(2))
    source, target = (device.empty(sizes[-1]) for _ in range(2))

    def out(nbytes: int) -> Callable[[], _Span]:
        return lambda: _copy(device, device.out, away[:nbytes], source[:nbytes])

    def into(nbytes: int) -> Callable[[], _Span]:
        return lambda: _copy(device, device.into, target[:nbytes], back[:nbytes])

    copy_out = tuple((n, _seconds(device, out(n))[0]) for n in sizes)
    copy_in = tuple((n, _seconds(device, into(n))[0]) for n in sizes)
    alone = copy_out[-1][1], copy_in[-1][1]
    together = _seconds(device, out(sizes[-1]), into(sizes[-1]))
    # Halfway between the time of the slower one and that of one after the other.
    duplex = max(together) < (max(alone) + sum(alone)) / 2
    return LinkTables(copy_out, copy_in, duplex)


def _copy(device: Device, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> _Span:
    ready, start, stop = device.event(), device.event(timed=True), device.event(timed=True)
    device.record(ready, device.current())
    device.wait(queue, ready)
    device.record(start, queue)
    device.copy(queue, target, source)
    device.record(stop, queue)
    return start, stop


def _seconds(device: Device, *copies: Callable[[], _Span]) -> list[float]:
    """Median seconds of each copy, all issued at once; the first time is warm-up."""
    times: list[list[float]] = [[] for _ in copies]
    for turn in range(_REPEATS + 1):
        spans = [copy() for copy in copies]
        for queue in (device.out, device.into):
            device.finish(queue)
        for taken, (start, stop) in zip(times, spans, strict=True):
            if turn:
                taken.append(device.seconds(start, stop))
    return [median(taken) for taken in times]
