"""Held: what this process's tensors hold on the device of one budget, by several ways to count."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from outcore.execute import Driver
from outcore.ir.trace import Trace
from outcore.measure import Elsewhere, allocated_bytes, resident_bytes
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.pause import Pause, Storages, storages_of
from outcore.runtime.roll import Roll


class Held:
    """What is held on a device, whoever made it."""

    def __init__(self, device: torch.device, driver: Driver, roll: Roll) -> None:
        self._device, self._driver, self._roll = device, driver, roll
        self._elsewhere = Elsewhere()
        self._collected_in = -1
        """The number of the step in which what is no one's any more was let go last."""
        self._littered = False
        """Whether a graph was captured since."""
        self._littered_in: int | None = None
        """The number of the step of the latest capture, until the next step has begun."""

    def captured(self) -> None:
        """Take that a graph was captured: compilers leave what is no one's, results among it."""
        self._littered, self._littered_in = True, self._roll.steps.number

    def tidy(self) -> None:
        """Let go, as a call begins, what captures of an earlier step left: no step has it again."""
        if self._littered_in is not None and self._littered_in < self._roll.steps.number:
            self._littered_in = None
            self.collect(again=True)

    def collect(self, *, again: bool = False) -> bool:
        """Let go what is no one's any more; whether it did: it takes long, and once a step will do.

        Unless a graph was captured since, or `again`: there is no room for what is counted.
        """
        known = self._collected_in == self._roll.steps.number and not self._littered
        if known and not again:
            return False
        gc.collect()
        self._collected_in, self._littered = self._roll.steps.number, False
        return True

    def resident_bytes(self, besides: Sequence[torch.Tensor] = ()) -> int:
        """Bytes that live tensors hold, those of `besides` left out."""
        return resident_bytes(self._device, besides, self._driver.ledger(), self._elsewhere)

    def besides_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """Bytes that live tensors hold now, but for those of the graph.

        Left out are its inputs and constants and, while it is profiled, what earlier calls of it
        made and hold. What the storages of inputs hold beyond them counts: the graph's trace knows
        nothing of that.
        """
        given = (*inputs, *graph.captured.constants)
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        tensors += [t for store in self._roll.stores.of(graph) for t in store.own()]
        return self.resident_bytes(tensors) + _beyond(graph.captured.trace, given, self._device)

    def others_bytes(self, graph: PlannedGraph) -> int:
        """What waiting calls of other graphs hold by their programs, if they have any."""
        return sum(s.executable.crossing_bytes for s in self._roll.stores.besides(graph))

    def allocated_bytes(self) -> int | None:
        """What the allocator's books have as given out; None where nobody keeps any."""
        if self._device.type == "cuda":
            return allocated_bytes(self._device)
        ledger = self._driver.ledger()
        return None if ledger is None else ledger.live_bytes

    def level_bytes(self, graph: PlannedGraph) -> int | None:
        """What is allocated while one call of `graph` waits for its backward.

        None where other calls wait too, and where nobody counts.
        """
        if self._roll.waiting(graph) != 1 or self._roll.outstanding(graph):
            return None
        return self.allocated_bytes()

    def storages(self, tensors: Iterable[Any]) -> Storages:
        """Those of `tensors` that `level_bytes` counts."""
        ledger = self._driver.ledger()
        counted = None if ledger is None else range(ledger.start, ledger.stop)
        return storages_of(tensors, self._device, counted)

    def begin_pause(
        self, graph: PlannedGraph, given: Storages, results: Iterable[Any]
    ) -> Pause | None:
        """What is held when a forward call of `graph` is over, which was `given` something."""
        level_bytes = self.level_bytes(graph)
        if level_bytes is None:
            return None
        own = Storages(given.found | self.storages(results).found)
        return Pause(level_bytes, own, own.expired)


def _beyond(trace: Trace, given: Sequence[Any], device: torch.device) -> int:
    """Bytes of the storages of `given`, inputs of `trace`, beyond what it has of them."""
    storages: dict[int, int] = {}
    for value, each in zip(trace.inputs, given, strict=True):
        if isinstance(each, torch.Tensor) and each.device == device:
            storage = each.untyped_storage()
            whole = storages.setdefault(storage.data_ptr(), storage.nbytes())
            storages[storage.data_ptr()] = whole - trace.buffers[trace.values[value].buffer].nbytes
    return sum(nbytes for nbytes in storages.values() if nbytes > 0)
