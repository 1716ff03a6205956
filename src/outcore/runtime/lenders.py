"""lenders: find the larger sizes whose plan a graph may run (`lending`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from outcore.ir.trace import Trace
from outcore.runtime.lending import covers

if TYPE_CHECKING:  # plans are made for graphs
    from outcore.runtime.graph import PlannedGraph
    from outcore.runtime.planned import Planned
    from outcore.runtime.profiling import Profiling


def planned_lender(graph: PlannedGraph, graphs: Sequence[PlannedGraph]) -> Planned | None:
    """The plan of the smallest sizes that are large enough for `graph`; None if there is none."""
    needed = _total_bytes(graph.captured.trace)
    larger = [
        (nbytes, planned)
        for each in _alike(graph, graphs)
        if (planned := each.planned) is not None
        and planned.calls == 1
        and planned.retaining_bytes is None
        and (nbytes := _total_bytes(planned.problem.trace)) >= needed
    ]
    in_order = (planned for _, planned in sorted(larger, key=itemgetter(0)))
    return next((p for p in in_order if covers(p.problem.trace, graph.captured.trace)), None)


def checked_lender(
    graph: PlannedGraph, graphs: Sequence[PlannedGraph]
) -> tuple[PlannedGraph, Profiling] | None:
    """The largest sizes for `graph` that have no plan, but a metered step, with its profiling."""
    checked = [
        (_total_bytes(each.captured.trace), each, profiling)
        for each in _alike(graph, graphs)
        if (profiling := each.profiling) is not None
        and each.may_lend
        and profiling.checked_workspace_bytes is not None
        and profiling.lent is None
        and each.status.most_outstanding == 1
        and not each.status.retained
    ]
    in_order = sorted(checked, key=itemgetter(0), reverse=True)
    trace = graph.captured.trace
    return next(((g, p) for _, g, p in in_order if covers(g.captured.trace, trace)), None)


def _alike(graph: PlannedGraph, graphs: Iterable[PlannedGraph]) -> Iterable[PlannedGraph]:
    return (each for each in graphs if each is not graph and each.origin == graph.origin)


def _total_bytes(trace: Trace) -> int:
    return sum(buffer.nbytes for buffer in trace.buffers)
