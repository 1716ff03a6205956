"""slabs: host memory for what leaves a device with queues, one piece per outstanding step."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from outcore.errors import HostMemoryError
from outcore.execute.device import Device, Event


@dataclass(slots=True, eq=False)
class Slab:
    """Host memory for one lane, and the place in the compute queue from which on it is free."""

    memory: torch.Tensor
    free: Event | None = None


class Slabs:
    """The slabs of a driver, within `budget_bytes` (None: no bound)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.budget_bytes: int | None = None
        self.taken_bytes = 0
        """Of all slabs, those of lanes included."""
        self._free: list[Slab] = []
        self._given: deque[Slab] = deque()
        """Given back since anybody looked."""
        self._lock = threading.Lock()
        self._closed = False

    def give(self, slab: Slab) -> None:
        """Let the next lane have `slab`. For finalisers too: takes no lock."""
        if not self._closed and len(slab.memory):
            self._given.append(slab)

    def take(self, nbytes: int) -> Slab:
        """The smallest slab that will do; else a new one, for which those not in use make way.

        Raises HostMemoryError where the budget or the system does not allow it.
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
            self.taken_bytes += nbytes
            return slab

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` of host memory that is taken elsewhere; negative: given back.

        Slabs that are not in use make way where need be. Raises as `take`.
        """
        with self._lock:
            budget = self.budget_bytes
            if budget is not None and self.taken_bytes + nbytes > budget:
                self._collect()
                self._drop()
            if nbytes > 0:
                self._check(nbytes)
            self.taken_bytes += nbytes

    def make_ready(self, nbytes: int) -> None:
        """Have one of `nbytes`, in the place of all that are not in use. Raises as `take`.

        A larger one is made to be it: pages that the system has given need not be asked for again.
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

    def close(self) -> None:
        """Drop all; those of lanes once they are given back."""
        with self._lock:
            self._closed = True
            self._collect()
            self._drop()

    def _check(self, nbytes: int) -> None:
        budget, taken = self.budget_bytes, self.taken_bytes
        if self._closed or (budget is not None and taken + nbytes > budget):
            reason = "the driver is closed" if self._closed else "the budget is used up"
            raise HostMemoryError(
                reason=reason, needed_bytes=nbytes, taken_bytes=taken, budget_bytes=budget
            )

    def _collect(self) -> None:
        while self._given:
            self._free.append(self._given.popleft())

    def _fitting(self, nbytes: int) -> Slab | None:
        """The smallest slab that will do, which is free no more; None where there is none."""
        fitting = [slab for slab in self._free if len(slab.memory) >= nbytes]
        found = min(fitting, key=lambda slab: len(slab.memory), default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _shrink(self, slab: Slab, nbytes: int) -> None:
        if len(slab.memory) > nbytes:
            self._finish()
            self.taken_bytes -= len(slab.memory)
            slab.memory = self.device.shrink(slab.memory, nbytes)
            self.taken_bytes += len(slab.memory)

    def _finish(self) -> None:
        """Wait for what was copied in the last step of a slab, and may still be on its way."""
        for queue in (self.device.out, self.device.into):
            self.device.finish(queue)

    def _drop(self) -> None:
        if self._free:
            self._finish()
        self.taken_bytes -= sum(len(slab.memory) for slab in self._free)
        self._free.clear()
