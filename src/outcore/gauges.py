"""What a driver offers to whoever measures: a clock for its work, the books of its allocator."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

Moment: TypeAlias = Any
"""What a clock gives, to be handed back to the same clock; opaque to others."""

OWN_THREADS = "outcore-"
"""How the names of outcore's own threads begin, which train nothing."""


class Clock(Protocol):
    """Tells when a device comes to what it is given to do."""

    def now(self) -> Moment:
        """The moment when what was given to the device so far is done."""
        ...

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Time between two moments; may wait for the second."""
        ...

    def come(self, moment: Moment) -> bool:
        """Whether the moment is past. Does not wait."""
        ...

    def wall_ns(self, moment: Moment) -> int:
        """When `now` was asked for it: nanoseconds of the wall clock (`time.time_ns`)."""
        ...


class WallClock:
    """The clock of a device that does everything at once (`Clock`): the host itself."""

    now = staticmethod(time.time_ns)

    def seconds(self, start: int, stop: int) -> float:
        """Time between two moments."""
        return (stop - start) * 1e-9

    def come(self, _: int) -> bool:
        """It is: nothing is given to the host beforehand."""
        return True

    def wall_ns(self, moment: int) -> int:
        """The moment itself."""
        return moment


class Holder(Protocol):
    """Somebody who holds free memory of a GPU, so that others find it where it should be."""

    def held_bytes(self, device: Any) -> int:
        """How much of a GPU, now."""
        ...


_holders: WeakSet[Holder] = WeakSet()
_lock = threading.Lock()


def add_holder(holder: Holder) -> None:
    """Have what `holder` holds count as free: it is in use to an allocator alone."""
    with _lock:
        _holders.add(holder)


def held_bytes(device: Any) -> int:
    """What all holders hold of a GPU."""
    with _lock:
        holders = list(_holders)
    return sum(holder.held_bytes(device) for holder in holders)


class Ledger(NamedTuple):
    """What an allocator has given out now, all of it from address `start` to `stop`."""

    live_bytes: int
    start: int
    stop: int
