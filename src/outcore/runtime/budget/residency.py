"""Residency: counts what this process's tensors hold on the device of one budget.

"External" bytes are held by live tensors outside the graph in question. "Base" bytes are external
bytes less what outstanding calls of other graphs alone hold.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from outcore.capture import is_batched
from outcore.execute import Driver
from outcore.interrupts import keeping_interrupts
from outcore.ir.trace import Ref
from outcore.measure import Elsewhere, allocated_bytes, level_and_peak, resident_bytes
from outcore.runtime.budget.registry import Registry
from outcore.runtime.graphs.calls import states_bytes
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.step.call_tensors import CallTensors, call_tensors
from outcore.runtime.step.pause import Pause, Storages, storages_of
from outcore.runtime.step.store import Store

MOST_COLLECTIONS = 8
"""Steps in which garbage is collected before it counts as held, or something is moved for it. A
program that leaves much garbage in each step would otherwise wait for the collector in each."""


class Residency:
    """Counts memory on a device, and collects garbage that would count as held."""

    def __init__(self, device: torch.device, driver: Driver, registry: Registry) -> None:
        self.device, self._driver, self._registry = device, driver, registry
        self._elsewhere = Elsewhere()
        self._collected_in = -1
        """Number of the step with the latest garbage collection."""
        self._littered = False
        """Whether a graph was compiled since then."""
        self._compiled_at: tuple[int, int] | None = None
        """(forward calls, backward calls) counted when a graph was last compiled, until the garbage
        of that is collected."""
        self._tangents: Sequence[torch.Tensor] = ()
        """Tangents that are there before the forward call that begins."""

    def compiled(self) -> None:
        """Note that a graph was compiled: compilers leave garbage, results of calls among it."""
        steps = self._registry.steps
        self._littered, self._compiled_at = True, (steps.calls, steps.returns)

    def tidy(self) -> None:
        """Before a call begins, collect the garbage that compilers left in an earlier step.

        No later step makes any of it, and calls whose results are among it would stay outstanding
        forever.
        """
        if self._compiled_at is None:
            return
        steps, (calls, returns) = self._registry.steps, self._compiled_at
        if steps.returns > returns or (steps.calls > calls and not len(self._registry.stores)):
            self._compiled_at = None
            self.collect(again=True)

    def sweep(self) -> None:
        """Collect the garbage of compilers before a count that plans will be made with."""
        if self._littered:
            self.collect()

    def collect(self, *, again: bool = False) -> bool:
        """Collect garbage; returns whether it did. It is slow, so once a step is enough.

        It does so again in the same step if a graph was compiled since, or with `again`, for when
        there is no room for what is counted.
        """
        known = self._collected_in == self._registry.steps.number and not self._littered
        if known and not again:
            return False
        with keeping_interrupts():  # garbage of compilers has callbacks
            gc.collect()
        self._collected_in, self._littered = self._registry.steps.number, False
        return True

    def resident_bytes(self, external: Sequence[torch.Tensor | torch.UntypedStorage] = ()) -> int:
        """Bytes that live tensors hold, without the tensors and storages in `external`."""
        return resident_bytes(self.device, external, self._driver.ledger(), self._elsewhere)

    def at_once(self) -> AbstractContextManager[None]:
        """In this context only outcore makes and frees tensors, so counts cost less."""
        return self._elsewhere.at_once()

    @contextmanager
    def beside_tangents(self, tangents: Sequence[Any]) -> Iterator[None]:
        """In this context, `tangents` of the forward call that begins are not external memory.

        Those that are parts of more memory are.
        """
        there = (t for t in tangents if isinstance(t, torch.Tensor) and not is_batched(t))
        dense = (t for t in there if t.layout is torch.strided)
        self._tangents = [t for t in dense if t.untyped_storage().nbytes() <= t.nbytes]
        try:
            yield
        finally:
            self._tangents = ()

    def external_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """Bytes that live tensors hold outside `graph` as a call of it begins.

        Inputs and constants of the call are left out, and what earlier calls of the graph alone
        hold. If the storage of an input is larger than the trace says, the excess counts.
        """
        given = (*inputs, *graph.captured.constants, *self._tangents)
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        mine = sum(store.private_bytes for store in self._registry.stores.of(graph))
        return self.resident_bytes(tensors) + self.given(graph, inputs).beyond_bytes - mine

    def base_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """`external_bytes` less what outstanding calls of other graphs alone hold."""
        return self.external_bytes(graph, inputs) - self.others_bytes(graph)

    def base_on_return_bytes(
        self, graph: PlannedGraph, store: Store, tangents: Sequence[Any], own: CallTensors
    ) -> int:
        """`base_bytes` as the call of `store` comes back, that is, as its backward begins.

        `own`: what the call was given and returned. The trace counts all of that throughout, so
        whatever of it is gone by now is subtracted.
        """
        held = (*store.crossing, *tangents, *graph.captured.constants)
        tensors = [t for t in held if isinstance(t, torch.Tensor)]
        mine = sum(s.private_bytes for s in self._registry.stores.of(graph) if s is not store)
        resident = self.resident_bytes([*tensors, *own.live]) + own.beyond_bytes
        return resident - own.gone_bytes - mine - self.others_bytes(graph)

    def others_bytes(self, graph: PlannedGraph) -> int:
        """What outstanding calls of other live graphs alone hold, by their programs."""
        return sum(store.private_bytes for store in self._registry.stores.external(graph))

    def with_others_bytes(self, graph: PlannedGraph) -> int:
        """The most extra base bytes measured with the present mix of other graphs' calls."""
        return graph.observed.called.excess_of(0, self._registry.outstanding(graph))

    def given(self, graph: PlannedGraph, inputs: Sequence[Any]) -> CallTensors:
        """What a call of `graph` is given: inputs and constants."""
        trace = graph.captured.trace
        things = (*inputs, *graph.captured.constants)
        return call_tensors(trace, zip(trace.inputs, things, strict=True), self.device)

    def returned(self, graph: PlannedGraph, results: Sequence[Any]) -> CallTensors:
        """What a call of `graph` returned. `results` may go on after the outputs of the trace."""
        trace = graph.captured.trace
        pairs = zip(trace.outputs, results, strict=False)
        tensors = ((ref.value, each) for ref, each in pairs if isinstance(ref, Ref))
        return call_tensors(trace, tensors, self.device)

    def allocated_bytes(self) -> int | None:
        """Bytes that the allocator has given out; None if nothing counts them."""
        if self.device.type == "cuda":
            return allocated_bytes(self.device)
        ledger = self._driver.ledger()
        return None if ledger is None else ledger.live_bytes + ledger.elsewhere_bytes(())

    def level_and_peak(self, *, anew: bool = False) -> tuple[int, int] | None:
        """What the allocator has given out, and the most at once; None if nothing counts it.

        On a CPU, the peak is counted from the latest call with `anew`.
        """
        if self.device.type == "cuda":
            return level_and_peak(self.device)
        ledger = self._driver.ledger()
        if ledger is None:
            return None
        beside = ledger.elsewhere_bytes(())
        return ledger.live_bytes + beside, ledger.peak_bytes(anew) + beside

    @property
    def overlooks_tensors(self) -> bool:
        """Whether tensors may hold memory that `allocated_bytes` leaves out, such as NumPy's."""
        return self.device.type != "cuda"

    def level_bytes(self, graph: PlannedGraph) -> int | None:
        """Allocated bytes while one call of `graph` is the only outstanding call.

        On a CPU large tensors alone are counted. None if there are other outstanding calls, or
        nothing counts allocated bytes.
        """
        if self._registry.waiting(graph) != 1 or self._registry.outstanding(graph):
            return None
        if self.device.type == "cuda":
            return self.allocated_bytes()
        ledger = self._driver.ledger()
        return None if ledger is None else ledger.live_bytes

    def states_bytes(self, graph: PlannedGraph) -> int:
        """Bytes of generator states that a waiting call of a planned graph holds, approximately.

        Plans have room for them on top of external memory.
        """
        planned = graph.planned
        if planned is None:
            return 0
        state = self._driver.generator.get_state()
        return states_bytes(planned.problem.trace, state.nbytes, planned.program)

    def storages(self, tensors: Iterable[Any]) -> Storages:
        """The storages of `tensors` that `level_bytes` counts."""
        return storages_of(tensors, self.device, self._counted)

    def begin_pause(self, graph: PlannedGraph, own: CallTensors) -> Pause | None:
        """What is held as a forward call of `graph` ends; None if `level_bytes` is None.

        `own`: what the call was given and returned.
        """
        level_bytes = self.level_bytes(graph)
        if level_bytes is None:
            return None
        return Pause(level_bytes, own.storages.within(self._counted).there())

    @property
    def _counted(self) -> range | None:
        """The addresses that `level_bytes` counts; None for all."""
        ledger = self._driver.ledger()
        return None if ledger is None else range(ledger.start, ledger.stop)
