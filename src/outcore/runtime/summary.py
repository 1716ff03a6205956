"""report_of: the Report of a Backend, summed over its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from outcore.gauges import Clock
from outcore.ir.hardware import Tier
from outcore.ir.program import Copy, Run, Stream
from outcore.policies import spec_text
from outcore.report import Counts, Report, count_choices
from outcore.runtime.engine import Engine
from outcore.runtime.options import DEFAULT_POLICY
from outcore.runtime.planning import Planned
from outcore.runtime.standing import Standing, State

if TYPE_CHECKING:  # the backend makes its report through here
    from outcore.runtime.backend import Backend


def report_of(backend: Backend) -> Report:
    """Everything known now; figures of graphs that are not planned yet are left out."""
    engine = backend.engine
    if engine is None:
        given = backend.options
        policy = str(given.policy or DEFAULT_POLICY)
        return Report(policy, State.IN_CORE.value, 0, notes=tuple(backend.notes))
    engine.close_step()
    graphs = engine.standings()
    planned = [g.planned for g in graphs if g.planned is not None]
    reasons = tuple(g.reason for g in graphs if g.reason)
    common = Report(
        policy=spec_text(engine.settings.policy),
        state=_state(graphs),
        budget_bytes=engine.settings.budget_bytes,
        graphs=len(graphs),
        capture_seconds=backend.capture_seconds,
        notes=(*backend.notes, *reasons),
    )
    return _with_plans(common, engine, graphs, planned) if planned else common


def _state(graphs: Iterable[Standing]) -> str:
    order = (State.PROFILING, State.PLANNED, State.IN_CORE)
    first = min((order.index(g.state) for g in graphs), default=2)
    return str(order[first].value)


def _with_plans(
    common: Report, engine: Engine, graphs: list[Standing], planned: list[Planned]
) -> Report:
    runs = [(p, x.action) for p in planned for x in p.program.body if isinstance(x.action, Run)]
    copies = [
        p.problem.trace.buffers[p.program.slots[x.action.source].buffer].nbytes
        for p in planned
        for x in p.program.body
        if isinstance(x.action, Copy) and x.stream is Stream.OUT
    ]
    measured = [_seconds(g, engine.driver.clock) for g in graphs if g.recent_work]
    return replace(
        common,
        resident_bytes=max(map(_resident_bytes, planned)),
        in_core_peak_bytes=max(p.in_core.peak(Tier.DEVICE) for p in planned),
        predicted_peak_bytes=max(p.predicted.peak(Tier.DEVICE) for p in planned),
        measured_peak_bytes=engine.measured_peak_bytes,
        predicted_seconds=_total(planned, lambda p: p.predicted.seconds),
        measured_seconds=sum(measured) if measured else None,
        in_core_seconds=_total(planned, lambda p: p.in_core.seconds),
        planning_seconds=_total(planned, lambda p: p.planning_seconds),
        counts=sum((count_choices(p.problem.trace, p.plan) for p in planned), start=Counts()),
        offloaded_bytes=sum(copies),
        recompute_seconds=sum(
            p.problem.profile.cost(r.op, r.variant).seconds for p, r in runs if r.again
        ),
        stall_seconds=_total(planned, lambda p: p.predicted.stall_seconds()),
    )


def _seconds(standing: Standing, clock: Clock) -> float:
    """Median time at work of the latest steps."""
    return median(sum(clock.seconds(*span) for span in work) for work in standing.recent_work)


def _total(planned: list[Planned], figure: Callable[[Planned], float]) -> float:
    return sum(map(figure, planned))


def _resident_bytes(planned: Planned) -> int:
    problem = planned.problem
    return problem.outside_bytes + sum(b.nbytes for b in problem.trace.buffers if b.pinned)
