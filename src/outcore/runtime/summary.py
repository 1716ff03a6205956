"""report_of: the Report of a Backend, summed over its graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from outcore.bound import lower_bound
from outcore.errors import MissingPackageError
from outcore.gauges import Clock
from outcore.ir.hardware import Tier
from outcore.policies import resolve, spec_text
from outcore.report import PlannedStep, Report, with_steps
from outcore.runtime.drift import WATCHED_STEPS
from outcore.runtime.engine import Engine
from outcore.runtime.options import DEFAULT_POLICY
from outcore.runtime.planned import Planned
from outcore.runtime.standing import Standing, State
from outcore.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:  # the backend makes its report through here
    from outcore.runtime.backend import Backend


ROUNDING = 1e-9
"""Relative error of sums of floats, well above what they have."""


RARE_DIVISOR = 16
"""Graphs that run in fewer steps than the most usual one over this are no part of a usual step."""


NOTHING = (
    "nothing came here to be planned: no training call so far, or what is called is compiled by "
    "another torch.compile, around what was wrapped: leave that out"
)


def report_of(backend: Backend, *, bound: bool = False) -> Report:
    """Everything known now; figures of graphs that are not planned yet are left out.

    `bound`: the lower bound too, where scipy is installed.
    """
    engine = backend.engine
    if engine is None:
        given = backend.options
        policy = spec_text(resolve(given.policy or DEFAULT_POLICY))
        budget = _bytes_known_anywhere(given.budget)
        return Report(policy, State.IN_CORE.value, budget, notes=tuple(backend.notes) or (NOTHING,))
    engine.close_step()
    everything = engine.standings()
    graphs = _usual(everything, engine.steps)
    reasons = tuple(g.reason for g in everything if g.reason)
    common = Report(
        policy=spec_text(engine.settings.policy),
        state=_state(graphs),
        budget_bytes=engine.settings.budget_bytes,
        graphs=len(graphs),
        capture_seconds=backend.capture_seconds,
        disk_bytes_written=engine.driver.disk_bytes_written(),
        notes=(
            *backend.notes,
            *engine.driver.notes(),
            *reasons,
            *_others_notes(everything, graphs),
        ),
    )
    if not any(g.planned for g in graphs):
        return common
    report = _with_plans(common, engine, graphs, everything)
    return _with_bound(report, graphs) if bound else report


def _usual(graphs: list[Standing], step: int) -> list[Standing]:
    """Those that run in a fair part of the latest steps, beside the one that runs most."""
    often = [graph.often(step) for graph in graphs]
    most = max(often, default=0)
    return [
        graph for graph, steps in zip(graphs, often, strict=True) if steps * RARE_DIVISOR >= most
    ]


OTHERS = (
    "{graphs} in few of the latest steps, as where the last batch of an epoch is smaller: all "
    "figures but peaks are of the others"
)


def _others_notes(graphs: list[Standing], usual: list[Standing]) -> Iterator[str]:
    """That figures leave some graphs out, where they do."""
    others = len(graphs) - len(usual)
    if others:
        yield OTHERS.format(graphs=f"{others} graph{'s run' if others > 1 else ' runs'}")


def _bytes_known_anywhere(budget: str | float | None) -> int:
    """Those of a budget that is no part of a device; 0 where it is."""
    if budget is None:
        return 0
    try:
        return parse_size(budget, None)
    except ValueError:
        return 0


def _state(graphs: Iterable[Standing]) -> str:
    order = (State.PROFILING, State.PLANNED, State.IN_CORE)
    first = min((order.index(g.state) for g in graphs), default=2)
    return str(order[first].value)


def _with_plans(
    common: Report, engine: Engine, graphs: list[Standing], everything: list[Standing]
) -> Report:
    """`common` with the figures of `graphs`; with the peaks of `everything` that runs."""
    clock = engine.driver.clock
    planned = [g.planned for g in everything if g.planned is not None]
    seconds = ((g.measured_seconds(clock), g.calls) for g in graphs)
    measured = [each * calls for each, calls in seconds if each is not None]
    steps = [_step(g.planned, g) for g in graphs if g.planned is not None]
    return replace(
        with_steps(common, steps),
        in_core_peak_bytes=max(p.in_core.peak(Tier.DEVICE) for p in planned),
        predicted_peak_bytes=max(p.predicted.peak(Tier.DEVICE) for p in planned),
        measured_peak_bytes=engine.measured_peak_bytes,
        measured_seconds=sum(measured) if measured else None,
        replans=sum(p.replanned is not None for p in planned),
        notes=(
            *common.notes,
            *_plan_notes(everything),
            *_peak_notes(engine, planned),
            *_after_notes(engine),
            *_drift_notes(everything, clock, engine.settings.drift),
        ),
    )


def _step(planned: Planned, standing: Standing) -> PlannedStep:
    return PlannedStep(
        problem=planned.problem,
        plan=planned.plan,
        program=planned.program,
        predicted=planned.predicted,
        in_core=planned.in_core,
        planning_seconds=planned.planning_seconds,
        measured=standing.measured,
        calls=standing.calls,
    )


def _with_bound(report: Report, graphs: list[Standing]) -> Report:
    try:
        return replace(report, lower_bound_seconds=sum(g.calls * _bound(g) for g in graphs))
    except MissingPackageError as error:
        return replace(report, notes=(*report.notes, f"no lower bound: {error}"))


def _bound(standing: Standing) -> float:
    """Worked out once per plan; 0 for a graph that has none."""
    planned = standing.planned
    if planned is None:
        return 0.0
    if standing.bound_seconds is None:
        least, predicted = lower_bound(planned.problem), planned.predicted.seconds
        if predicted < least <= predicted * (1 + ROUNDING):
            least = predicted  # the same sum, added up in another order
        standing.bound_seconds = least
    return standing.bound_seconds


RETAINED = (
    "backward was called with retain_graph after the plan was made: what waits for it stays until "
    "the last of them, and the step may hold more than is predicted"
)


OUTSTANDING = (
    "up to {now} calls waited for their backward at once, and no plan is known that has room for "
    "more than {planned} within the budget: the step may hold more than is predicted"
)


def _plan_notes(graphs: list[Standing]) -> Iterator[str]:
    """Where plans come from, if the user gave a file of them; and what they do not know of."""
    for number, standing in enumerate(graphs, 1):
        planned = standing.planned
        if planned is None:
            continue
        unforeseen = standing.retained and planned.retaining_bytes is None
        more = standing.most_outstanding > planned.calls
        waited = OUTSTANDING.format(now=standing.most_outstanding, planned=planned.calls)
        for note in filter(None, (planned.note, RETAINED * unforeseen, waited * more)):
            yield f"graph {number}: {note}" if len(graphs) > 1 else note


def _peak_notes(engine: Engine, planned: list[Planned]) -> Iterator[str]:
    """Whether a step held more than was promised: not by its graphs, then."""
    measured, budget = engine.measured_peak_bytes, engine.settings.budget_bytes
    promised = max((p.predicted.peak(Tier.DEVICE) for p in planned), default=budget)
    if measured is not None and measured > max(budget, promised):
        yield (
            f"the last metered step held {format_bytes(measured)}, more than the budget of "
            f"{format_bytes(budget)}: this process holds more beside the graphs than when they "
            "were planned; make a new backend once everything else is in memory"
        )


def _after_notes(engine: Engine) -> Iterator[str]:
    """Whether more was held after backward than the budget: plans know nothing of that."""
    after, budget = engine.measured_after_bytes, engine.settings.budget_bytes
    if after is not None and after > max(budget, engine.measured_peak_bytes or 0):
        yield (
            f"after backward, {format_bytes(after)} were held in the last metered step, more "
            f"than the budget of {format_bytes(budget)}: no plan covers what is made there, as by "
            "an optimizer's step, which makes least with fused=True"
        )


def _drift_notes(graphs: list[Standing], clock: Clock, margin: float | None) -> Iterator[str]:
    for number, standing in enumerate(graphs, 1):
        text = _drift_note(standing, clock, margin)
        if text:
            yield f"graph {number}: {text}" if len(graphs) > 1 else text


def _drift_note(standing: Standing, clock: Clock, margin: float | None) -> str:
    """How far the steps of a graph were from the prediction, where that is beyond `margin`."""
    planned = standing.planned
    if planned is None:
        return ""
    now = standing.drift(clock, WATCHED_STEPS)
    drifts = now is not None and now.beyond(margin)
    if planned.replanned is None:
        kept = "; all is kept, so there is nothing to plan again" * planned.everything_kept
        return f"{now}{kept}" if drifts else ""
    past = planned.replanned
    plan = "another plan" if past.changed else "the same plan"
    before, after = past.drift.predicted_seconds, planned.predicted.seconds
    text = (
        f"{past.drift}: planned again with measured times: {plan}, predicted "
        f"{format_seconds(after)} instead of {format_seconds(before)}"
    )
    measured = standing.measured_seconds(clock)
    if measured is not None:
        text += f", measured {format_seconds(measured)}"
    return text + "; that is off too, and it is not planned once more" * drifts
