"""gauges: what a device driver offers for measuring: a clock, and its allocator's counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

Moment: TypeAlias = Any
"""A point in time from a clock, meant for the same clock only; opaque to everything else."""

OWN_THREADS = "outcore-"
"""Prefix of the names of outcore's threads, which train nothing."""


class Clock(Protocol):
    """Times the work that was given to a device."""

    def now(self) -> Moment:
        """Return the moment at which the work given to the device so far is done."""
        ...

    def at(self, wall_ns: int) -> Moment:
        """Return the same as `now`; the method `wall_ns` will return `wall_ns` for it."""
        ...

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Return the time between two moments; may wait for the second one."""
        ...

    def come(self, moment: Moment) -> bool:
        """Whether the moment has passed. Does not wait."""
        ...

    def wall_ns(self, moment: Moment) -> int:
        """Return when `now` returned it, in nanoseconds of the wall clock (`time.time_ns`).

        For moments of `at`, return what it was given.
        """
        ...


class WallClock:
    """The clock of a device that does all work immediately: the host itself."""

    now = staticmethod(time.time_ns)

    def at(self, wall_ns: int) -> int:
        """Return the given time."""
        return wall_ns

    def seconds(self, start: int, stop: int) -> float:
        """Return the time between two moments; 0 if the clock was set back in between."""
        return max(0, stop - start) * 1e-9

    def come(self, _: int) -> bool:
        """Return True: the host has no queued work."""
        return True

    def wall_ns(self, moment: int) -> int:
        """Return the moment itself."""
        return moment


class Holder(Protocol):
    """Something that holds free memory of a GPU, so that tensors get it where they should lie."""

    def held_bytes(self, device: Any) -> int:
        """Return how much of a GPU's memory it holds now."""
        ...


_holders: WeakSet[Holder] = WeakSet()
_listeners: list[Callable[[bool], object]] = []
_refusals = 0
_lock = threading.Lock()


def add_holder(holder: Holder) -> None:
    """Count what `holder` holds as free memory: only an allocator sees it as used."""
    with _lock:
        _holders.add(holder)


def held_bytes(device: Any) -> int:
    """Return how much of a GPU's memory all holders hold."""
    with _lock:
        holders = list(_holders)
    return sum(holder.held_bytes(device) for holder in holders)


def note_refusal() -> None:
    """Note that the device refused a request for memory that was a try: no op lacks anything."""
    global _refusals  # noqa: PLW0603 - a counter of the process, as the allocator's
    with _lock:
        _refusals += 1


def own_refusals() -> int:
    """How many such requests there were in this process. An allocator counts them, too."""
    return _refusals


def when_metered(listener: Callable[[bool], object]) -> None:
    """Have `listener` called on each thread on which a meter begins (True) or has ended (False)."""
    _listeners.append(listener)


def tell_metered(*, begins: bool) -> None:
    """Tell that a meter is about to begin on this thread, or has ended there."""
    for listener in _listeners:
        listener(begins)


class Ledger(NamedTuple):
    """What an allocator has in use now. Large buffers lie between two addresses."""

    live_bytes: int
    """Bytes in use from `start` to `stop`."""
    start: int
    stop: int
    elsewhere_bytes: Callable[[Collection[int]], int]
    """The bytes in use elsewhere, but those at the given addresses."""
    peak_bytes: Callable[[bool], int]
    """The most bytes in use from `start` to `stop` at once, since this was called with True."""
