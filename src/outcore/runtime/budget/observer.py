"""observer: count the external memory of each graph as its calls begin, wait and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

from outcore.runtime.budget.registry import Registry
from outcore.runtime.budget.residency import Residency
from outcore.runtime.graphs.calls import counted_bytes, gradient_bytes
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.profiling import Profiling
from outcore.runtime.step.store import Store
from outcore.runtime.step.visit import Interlude, Visit


class Observer:
    """Counts external memory per mix of outstanding calls, into each graph's `Observations`.

    It counts in timed steps, and when a planned graph meets a mix that was not counted before.
    """

    def __init__(self, registry: Registry, residency: Residency) -> None:
        self._registry, self._residency = registry, residency

    def called(self, graph: PlannedGraph, own: int, inputs: Sequence[Any]) -> None:
        """Note which calls are outstanding as a call begins, `own` of them of this graph.

        Also counts external memory if the graph has a plan and this mix was not counted yet.
        """
        others, beyond = self._registry.outstanding(graph), None
        observed, planned = graph.observed, graph.planned
        if observed.called.knows(own, others, counted=planned is not None):
            observed.latest_mix_uncounted = False
            return
        observed.latest_mix_uncounted = planned is not None and not observed.called.counted(
            own, others
        )
        if planned is not None and observed.latest_mix_uncounted:
            self._residency.sweep()
            base_bytes = planned.external.base_bytes - planned.external.dropped_bytes
            beyond = self._residency.base_bytes(graph, inputs) - base_bytes
        for other in others:  # it may have left no room for the gradients of this graph
            if other not in observed:
                other.observed.unchecked = True
        if observed.called.note(own, others, beyond):
            observed.unchecked = True

    def metered(self, graph: PlannedGraph, inputs: Sequence[Any]) -> None:
        """Note the external memory as a planned graph's first call in a metered step begins."""
        if not self._registry.waiting(graph):
            self._residency.sweep()
            graph.observed.first_bytes = self._residency.base_bytes(graph, inputs)

    def base(
        self, graph: PlannedGraph, profiling: Profiling, own: int, resident_bytes: int
    ) -> None:
        """Note the external memory as a timed call begins, or the first call of a checked step.

        Other checked calls do not count, as those before them also hold their inputs.
        `resident_bytes`: all external memory, without what the graph's own outstanding calls alone
        hold.
        """
        base_bytes = resident_bytes - self._residency.others_bytes(graph)
        if profiling.times:
            beyond = profiling.timings.began(base_bytes, first=not own)
            graph.observed.called.note(own, self._registry.outstanding(graph), beyond)
        elif not own:
            profiling.checks.began(base_bytes)

    def returned(self, graph: PlannedGraph, store: Store, tangents: Sequence[Any]) -> None:
        """Note which calls are outstanding as a call comes back.

        For a timed call, also note the external memory, which of its inputs and outputs are gone,
        and which calls came back earlier in the step. For a planned call that began with a new mix,
        note the external memory.
        """
        registry, profiling, planned = self._registry, graph.profiling, graph.planned
        own, others, beyond = registry.waiting(graph) - 1, registry.outstanding(graph), None
        call_tensors, timed = store.visit.call_tensors, graph.times(store.executable)
        if call_tensors is not None and (planned is not None or timed):
            self._residency.sweep()
            base = self._residency.base_on_return_bytes(graph, store, tangents, call_tensors)
            first = 0 if profiling is None else profiling.timings.latest_base_bytes
            beyond = base - (first if planned is None else planned.external.base_bytes)
            beyond -= _foreseen_gradient_bytes(graph) if store.visit.waits else 0
        if call_tensors is not None and profiling is not None and timed:
            profiling.timings.came_back(call_tensors.gone)
            if not own:
                step = registry.steps.number
                returned = {g: g.status.history.returned(step) for g in registry.active()}
                graph.observed.meet(returned, _gradient_bytes)
        if graph.observed.returned.note(own, others, beyond):
            graph.observed.unchecked = True

    def waited(self, graph: PlannedGraph, visit: Visit, tangents: Sequence[Any]) -> None:
        """Note how much memory was freed while a profiled visit waited, as its backward begins."""
        pause, visit.pause = visit.pause, None
        if graph.profiling is None or pause is None:
            return
        level_bytes = self._residency.level_bytes(graph)
        if level_bytes is not None:
            given = self._residency.storages(tangents)
            graph.profiling.timings.waited(pause.gone_bytes(level_bytes + visit.away_bytes, given))

    def paused(
        self,
        graph: PlannedGraph,
        interlude: Interlude,
        calls: Mapping[PlannedGraph, int],
        peak_bytes: Callable[[], int],
    ) -> None:
        """Note the most held between two calls of a step while a call of `graph` was outstanding.

        Checked steps do not count, as they also hold the inputs of calls. Among planned graphs,
        only the one whose call began last notes it. `calls`: outstanding calls by graph.
        """
        profiling, observed = graph.profiling, graph.observed
        if graph.planned is not None and interlude.latest() is graph:
            paused, first_bytes = observed.paused_since, observed.first_bytes
            external = graph.planned.external
            if first_bytes is not None and external.dropped_bytes:  # the base is of other calls
                first_bytes = max(first_bytes, external.base_bytes)
        elif profiling is not None and profiling.times_pause:
            paused, first_bytes = observed.paused, profiling.timings.latest_base_bytes
        else:
            return
        if first_bytes is None:
            return
        if ref(graph) in interlude.again:
            first_bytes += _foreseen_gradient_bytes(graph)
        others = {g: n for g, n in calls.items() if g is not graph}
        held = peak_bytes() - interlude.private_bytes - counted_bytes(graph.captured.trace)
        held -= calls[graph] * self._residency.states_bytes(graph)
        if paused.note(calls[graph] - 1, others, held - first_bytes):
            observed.unchecked = True


def _foreseen_gradient_bytes(graph: PlannedGraph) -> int:
    """What a plan has room for once a call has come back that will do so again: its gradients.

    A plan that was made before a call first did (`retain_graph`) has none.
    """
    planned = graph.planned
    unforeseen = planned is not None and planned.retaining_bytes is None
    return 0 if unforeseen else gradient_bytes(graph.captured.trace)


def _gradient_bytes(graph: PlannedGraph) -> int:
    return gradient_bytes(graph.captured.trace)
