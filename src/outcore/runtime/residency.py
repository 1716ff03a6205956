"""Residency: what this process's tensors hold on the device of one budget."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from outcore.execute import Driver
from outcore.ir.trace import Ref
from outcore.measure import Elsewhere, allocated_bytes, resident_bytes
from outcore.runtime.call_tensors import CallTensors, call_tensors
from outcore.runtime.calls import states_bytes
from outcore.runtime.graph import PlannedGraph
from outcore.runtime.pause import Pause, Storages, storages_of
from outcore.runtime.registry import Registry
from outcore.runtime.store import Store


class Residency:
    """What is held on a device, whoever made it."""

    def __init__(self, device: torch.device, driver: Driver, registry: Registry) -> None:
        self._device, self._driver, self._registry = device, driver, registry
        self._elsewhere = Elsewhere()
        self._collected_in = -1
        """The number of the step in which what is no one's any more was let go last."""
        self._littered = False
        """Whether a graph was captured since."""
        self._captured_at: tuple[int, int] | None = None
        """How many calls had begun and come back at the latest capture, until that is let go."""

    def captured(self) -> None:
        """Take that a graph was captured: compilers leave what is no one's, results among it."""
        steps = self._registry.steps
        self._littered, self._captured_at = True, (steps.calls, steps.returns)

    def tidy(self) -> None:
        """Let go, before a call begins, what captures of an earlier step left.

        No step has it again, and calls whose results are among it would wait for ever.
        """
        if self._captured_at is None:
            return
        steps, (calls, returns) = self._registry.steps, self._captured_at
        if steps.returns > returns or (steps.calls > calls and not len(self._registry.stores)):
            self._captured_at = None
            self.collect(again=True)

    def sweep(self) -> None:
        """Let go what captures left: what is counted now will be part of plans."""
        if self._littered:
            self.collect()

    def collect(self, *, again: bool = False) -> bool:
        """Let go what is no one's any more; whether it did: it takes long, and once a step will do.

        Unless a graph was captured since, or `again`: there is no room for what is counted.
        """
        known = self._collected_in == self._registry.steps.number and not self._littered
        if known and not again:
            return False
        gc.collect()
        self._collected_in, self._littered = self._registry.steps.number, False
        return True

    def resident_bytes(self, external: Sequence[torch.Tensor | torch.UntypedStorage] = ()) -> int:
        """Bytes that live tensors hold, those of `besides` left out."""
        return resident_bytes(self._device, external, self._driver.ledger(), self._elsewhere)

    def external_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """Bytes that live tensors hold as a call begins, but for those of the graph.

        Left out are its inputs and constants, and what earlier calls of it alone hold. What the
        storages of inputs hold beyond them counts: the graph's trace knows nothing of that.
        """
        given = (*inputs, *graph.captured.constants)
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        mine = sum(store.private_bytes for store in self._registry.stores.of(graph))
        return self.resident_bytes(tensors) + self.given(graph, inputs).beyond_bytes - mine

    def base_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """The same but for what waiting calls of other graphs alone hold."""
        return self.external_bytes(graph, inputs) - self.others_bytes(graph)

    def base_on_return_bytes(
        self, graph: PlannedGraph, store: Store, tangents: Sequence[Any], own: CallTensors
    ) -> int:
        """Bytes that live tensors hold as the call of `store` comes back, but for the graph's.

        And for what other calls alone hold. `own`: what the call was given, and returned. The
        trace counts that throughout, so that where something of it is gone, there is so much less.
        """
        held = (*store.crossing, *tangents, *graph.captured.constants)
        tensors = [t for t in held if isinstance(t, torch.Tensor)]
        mine = sum(s.private_bytes for s in self._registry.stores.of(graph) if s is not store)
        resident = self.resident_bytes([*tensors, *own.live]) + own.beyond_bytes
        return resident - own.gone_bytes - mine - self.others_bytes(graph)

    def others_bytes(self, graph: PlannedGraph) -> int:
        """What waiting calls of other graphs alone hold by their programs, if they have any."""
        return sum(store.private_bytes for store in self._registry.stores.external(graph))

    def with_others_bytes(self, graph: PlannedGraph) -> int:
        """How much more was held, at most, where calls of others waited as they do now."""
        return graph.observed.called.beyond_of(0, self._registry.outstanding(graph))

    def given(self, graph: PlannedGraph, inputs: Sequence[Any]) -> CallTensors:
        """What a call of `graph` gets."""
        trace = graph.captured.trace
        things = (*inputs, *graph.captured.constants)
        return call_tensors(trace, zip(trace.inputs, things, strict=True), self._device)

    def returned(self, graph: PlannedGraph, results: Sequence[Any]) -> CallTensors:
        """What a call of `graph` gives, `results` first."""
        trace = graph.captured.trace
        pairs = zip(trace.outputs, results, strict=False)
        tensors = ((ref.value, each) for ref, each in pairs if isinstance(ref, Ref))
        return call_tensors(trace, tensors, self._device)

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
        if self._registry.waiting(graph) != 1 or self._registry.outstanding(graph):
            return None
        return self.allocated_bytes()

    def states_bytes(self, graph: PlannedGraph) -> int:
        """What a call of a planned graph holds of generator states while it waits: about so much.

        Plans have room for that outside of all that is held besides.
        """
        planned = graph.planned
        if planned is None:
            return 0
        state = self._driver.generator.get_state()
        return states_bytes(planned.problem.trace, state.nbytes, planned.program)

    def storages(self, tensors: Iterable[Any]) -> Storages:
        """Those of `tensors` that `level_bytes` counts."""
        return storages_of(tensors, self._device, self._counted)

    def begin_pause(self, graph: PlannedGraph, own: CallTensors) -> Pause | None:
        """What is held when a forward call of `graph` is over; `own`: given to it, and returned."""
        level_bytes = self.level_bytes(graph)
        if level_bytes is None:
            return None
        return Pause(level_bytes, own.storages.within(self._counted).there())

    @property
    def _counted(self) -> range | None:
        """The addresses that `level_bytes` counts; None for all."""
        ledger = self._driver.ledger()
        return None if ledger is None else range(ledger.start, ledger.stop)
