"""slabs: host memory for what a device with queues offloads, one slab per outstanding step."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

import torch

from outcore.errors import HostMemoryError
from outcore.execute.device import Device, Event

SNUG = 2
"""A slab this many times as large as what is needed is left to those who need more."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Slab:
    """Host memory for one lane."""

    memory: torch.Tensor
    """Flat bytes."""
    free: Event | None = None
    """The position in the compute queue after which the memory is free; None: it is free now."""


class Slabs:
    """The slabs of a driver, within `budget_bytes`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.budget_bytes: int | None = None
        """The most host memory to take; None: no limit."""
        self._slabs = WeakSet[Slab]()
        """All slabs that are alive, those in use by lanes included."""
        self._elsewhere_bytes = 0
        """What `hold` counts."""
        self._free: list[Slab] = []
        """Slabs that no lane uses."""
        self._given: deque[Slab] = deque()
        """Slabs that lanes gave back and that are not in `_free` yet."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def taken_bytes(self) -> int:
        """Bytes of all slabs, those in use by lanes included, and what `hold` counts.

        A slab that is lost, because an interrupt came before its lane was made, counts no more.
        """
        return self._elsewhere_bytes + sum(len(slab.memory) for slab in self._slabs)

    def give(self, slab: Slab) -> None:
        """Give `slab` back for the next lane. Takes no lock, so finalizers may call it."""
        if not self._closed and len(slab.memory):
            self._given.append(slab)

    def take(self, nbytes: int) -> Slab:
        """Take the smallest slab that fits; if none does, drop the unused ones and make one.

        Raises HostMemoryError if the budget or the system does not allow it.
        """
        if not nbytes:
            return Slab(torch.empty(0, dtype=torch.uint8, device="cpu"))
        with self._lock:
            self._collect()
            found = None if self._closed else self._fitting(nbytes)
            if found is not None:
                return found
            self._drop()
            self._check(nbytes)
            slab = Slab(self.device.host(nbytes))
            self._slabs.add(slab)
            return slab

    def has(self, nbytes: int) -> bool:
        """Whether `take` would find room, as far as the budget says."""
        with self._lock:
            self._collect()
            unused = [len(slab.memory) for slab in self._free]
            needed = self.taken_bytes - sum(unused) + nbytes
            fits = any(each >= nbytes for each in unused)
            return fits or self.budget_bytes is None or needed <= self.budget_bytes

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` of host memory that is allocated elsewhere; negative: it was freed.

        Unused slabs are dropped if the budget requires it. Raises as `take` does.
        """
        with self._lock:
            budget = self.budget_bytes
            if budget is not None and self.taken_bytes + nbytes > budget:
                self._collect()
                self._drop()
            if nbytes > 0:
                self._check(nbytes)
            self._elsewhere_bytes += nbytes

    def make_ready(self, nbytes: int) -> None:
        """Have one unused slab of `nbytes`, and drop all other unused slabs.

        Raises as `take` does. A larger slab is shrunk if there is one, so that the system need not
        provide its pages again.
        """
        with self._lock:
            self._collect()
            found = self._fitting(nbytes) if nbytes else None
            self._drop()
            if found is not None:
                self._shrink(found, nbytes)
                self._free.append(found)
                return
        self.give(self.take(nbytes))

    def make_ready_beside(self, nbytes: int) -> None:
        """Have one unused slab of `nbytes` to twice as many, and keep other unused slabs.

        If that is more than the budget or the system allows, as `make_ready`.
        """
        with self._lock:
            self._collect()
            unused = [len(slab.memory) for slab in self._free]
            if any(nbytes <= each <= SNUG * nbytes for each in unused):
                return
            with suppress(HostMemoryError):
                self._check(nbytes)
                slab = Slab(self.device.host(nbytes))
                self._slabs.add(slab)
                self._free.append(slab)
                return
        self.make_ready(nbytes)

    def close(self) -> None:
        """Drop all slabs; those in use by lanes are dropped when they are given back."""
        with self._lock:
            self._closed = True
            self._collect()
            self._drop()

    def _check(self, nbytes: int) -> None:
        """Raise HostMemoryError if `nbytes` more are not allowed."""
        budget, taken = self.budget_bytes, self.taken_bytes
        if self._closed or (budget is not None and taken + nbytes > budget):
            reason = "the driver is closed" if self._closed else "host_budget is used up"
            raise HostMemoryError(
                reason=reason, needed_bytes=nbytes, taken_bytes=taken, budget_bytes=budget
            )

    def _collect(self) -> None:
        """Move the slabs that were given back to `_free`."""
        while self._given:
            self._free.append(self._given.popleft())

    def _fitting(self, nbytes: int) -> Slab | None:
        """Take the smallest slab of at least `nbytes` out of `_free`; None if there is none."""
        fitting = [slab for slab in self._free if len(slab.memory) >= nbytes]
        found = min(fitting, key=lambda slab: len(slab.memory), default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _shrink(self, slab: Slab, nbytes: int) -> None:
        if len(slab.memory) > nbytes:
            self._finish()
            slab.memory = self.device.shrink(slab.memory, nbytes)

    def _finish(self) -> None:
        """Wait for copies of the last step that used a slab: they may still be in progress."""
        for queue in (self.device.out, self.device.into):
            self.device.finish(queue)

    def _drop(self) -> None:
        """Free all unused slabs."""
        if self._free:
            self._finish()
        self._free.clear()
