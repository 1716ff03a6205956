"""summary: make the Report of a Backend, summed over its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from outcore.bound import lower_bound
from outcore.errors import MissingPackageError
from outcore.gauges import Clock
from outcore.ir.hardware import Tier
from outcore.ir.margin import margin_bytes
from outcore.policies import resolve, spec_text
from outcore.report import PlannedStep, Report, with_steps
from outcore.runtime.budget.engine import Engine
from outcore.runtime.graphs.drift import WATCHED_STEPS
from outcore.runtime.graphs.history import LATEST, RECURS_WITHIN, CallsAtOnce
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.status import GraphStatus, State
from outcore.runtime.settings.options import DEFAULT_POLICY
from outcore.runtime.state import BackendState
from outcore.units import format_bytes, format_seconds, parse_size


class Part(NamedTuple):
    """A graph that follows a plan, and what it adds to a step."""

    status: GraphStatus
    planned: Planned
    step: PlannedStep


ROUNDING = 1e-9
"""Relative error allowed for sums of floats, well above what they have."""


RARE_DIVISOR = 16
"""Graphs with fewer calls than this part of those of the most frequent graph of their kind are
rare."""


NOTHING = (
    "nothing to plan so far. Either there was no training call, or the module is compiled as a "
    "part of a wrapped model around it, under that model's budget, or another torch.compile is "
    "around it: leave that one out"
)


def report_of(state: BackendState, *, bound: bool = False) -> Report:
    """Everything known now; figures leave out graphs that are not planned yet.

    `bound`: add the lower bound, if scipy is installed.
    """
    engine = state.engine
    if engine is None:
        given = state.options
        policy = spec_text(resolve(given.policy or DEFAULT_POLICY))
        budget = _bytes_known_anywhere(given.budget)
        notes = tuple(state.notes) or (NOTHING,)
        return Report(policy, State.UNPLANNED.value, budget, notes=notes)
    engine.close_step(early=True)
    everything = engine.registry.statuses()
    graphs = _usual(everything)
    reasons = tuple(g.reason for g in everything if g.reason)
    common = Report(
        policy=spec_text(engine.settings.policy),
        state=_state(graphs),
        budget_bytes=engine.settings.budget_bytes,
        graphs=len(graphs),
        others=len(everything) - len(graphs),
        capture_seconds=state.capture_seconds,
        disk_bytes_written=engine.driver.disk_bytes_written(),
        notes=(*state.notes, *engine.driver.notes(), *reasons),
    )
    if not any(g.follows for g in graphs):
        return common
    parts = list(_planned_steps(engine, graphs))
    report = _with_plans(common, engine, parts, everything)
    return _with_bound(report, parts) if bound else report


def _usual(graphs: list[GraphStatus]) -> list[GraphStatus]:
    """All graphs but rare ones (`_rare`), which have steps of their own."""
    rare = {id(graph) for alike in _by_kind(graphs).values() for graph in _rare(alike)}
    return [graph for graph in graphs if id(graph) not in rare]


def _by_kind(graphs: list[GraphStatus]) -> dict[tuple[str, ...], list[GraphStatus]]:
    """The graphs by kind (`GraphStatus.kind`)."""
    kinds: dict[tuple[str, ...], list[GraphStatus]] = {}
    for graph in graphs:
        kinds.setdefault(graph.kind, []).append(graph)
    return kinds


def _rare(alike: list[GraphStatus]) -> Iterator[GraphStatus]:
    """Of graphs of one kind, those with few of the latest calls that run in steps of their own.

    None of these steps has a call of the most frequent graph. A graph without any backward call may
    run in each step, so it is not rare. Lists are copied first: another thread may be in the middle
    of a step.
    """
    calls = sorted(
        (call, i) for i, graph in enumerate(alike) for call in list(graph.history.latest_calls)
    )
    often = Counter(i for _, i in calls[-LATEST:])
    usual = max(range(len(alike)), key=lambda i: often[i])
    steps = {step for step, _ in list(alike[usual].history.latest_steps)}
    for i, graph in enumerate(alike):
        few = graph.history.latest_steps and often[i] * RARE_DIVISOR < often[usual]
        if few and steps.isdisjoint(step for step, _ in list(graph.history.latest_steps)):
            yield graph


def _shares(graphs: list[GraphStatus], under_way: int | None) -> Iterator[float]:
    """For each graph, the part of the latest steps in which it ran.

    It is 1 unless graphs for other sizes ran too, and 0 if only those did. Graphs with the same
    trace (twins, layers) are not its other sizes.
    """
    ran = {
        id(g): {step for step, _ in list(g.history.latest_steps) if step != under_way}
        for g in graphs
    }
    kinds = _by_kind(graphs)
    for graph in graphs:
        sizes = (g for g in kinds[graph.kind] if g.identity != graph.identity)
        own = ran[id(graph)]
        latest = sorted(own.union(*(ran[id(other)] for other in sizes)))[-LATEST:]
        yield len(own.intersection(latest)) / len(latest) if latest else 1.0


OTHERS = (
    "{graphs} in few of the latest steps, for example if the last batch of an epoch is smaller: "
    "the figures are for the other graphs, except the peaks, which cover all"
)


def _others_notes(others: int) -> Iterator[str]:
    """A note that figures leave some graphs out, if they do."""
    if others:
        yield OTHERS.format(graphs=f"{others} graph{'s run' if others > 1 else ' runs'}")


TURNS = (
    "graphs take turns, as with batches of several sizes or parts that some steps freeze ({turns} "
    "of the graphs with a plan): the figures are averages over the latest steps"
)


def _turns_notes(steps: Iterable[PlannedStep]) -> Iterator[str]:
    """A note that figures are averages, if they are."""
    turns = sum(step.share < 1 for step in steps)
    if turns:
        yield TURNS.format(turns=turns)


def _bytes_known_anywhere(budget: str | float | None) -> int:
    """Bytes of a budget that is not a part of a device; 0 for one that is."""
    if budget is None:
        return 0
    try:
        return parse_size(budget, None)
    except ValueError:
        return 0


def _state(graphs: Sequence[GraphStatus]) -> str:
    """The state of the graphs that somebody differentiates, if there are any; else of all."""
    order = (State.PROFILING, State.PLANNED, State.IN_CORE, State.UNPLANNED)
    came_back = [g for g in graphs if g.history.latest_calls and not g.settled]
    asked = [*came_back, *(g for g in graphs if g.planned)] or graphs
    return str(min(map(_way, asked), key=order.index, default=State.UNPLANNED).value)


def _way(graph: GraphStatus) -> State:
    """The state of a graph, by the plan that its steps follow if they do."""
    if graph.state is State.PROFILING and graph.follows is not None:
        return State.under(graph.follows)
    return graph.state


def _planned_steps(engine: Engine, graphs: list[GraphStatus]) -> Iterator[Part]:
    """The graphs that follow a plan, and what each adds to a step."""
    under_way = engine.steps.number if engine.registry.awaits() else None
    found = [(graph, plan) for graph in graphs if (plan := graph.follows) is not None]
    shares = _shares([graph for graph, _ in found], under_way)
    for (graph, planned), share in zip(found, shares, strict=True):
        if share:
            step = _step(planned, graph, graph.history.calls(under_way), share)
            yield Part(graph, planned, step)


def _with_plans(
    common: Report, engine: Engine, parts: list[Part], everything: list[GraphStatus]
) -> Report:
    """`common` with the figures of `parts`, and with the peaks of `everything`."""
    clock = engine.driver.clock
    planned = [(p, g.growth.unplanned_bytes) for g in everything if (p := g.follows) is not None]
    steps = [part.step for part in parts]
    named = list(_named([part.status for part in parts], everything))
    return replace(
        with_steps(common, steps),
        in_core_peak_bytes=max(p.in_core.peak(Tier.DEVICE) + came for p, came in planned),
        predicted_peak_bytes=max(_grown(p, came, common.budget_bytes) for p, came in planned),
        measured_peak_bytes=engine.metering.peak_bytes,
        measured_seconds=_measured_seconds(clock, parts),
        replans=sum(part.planned.replanned is not None for part in parts),
        notes=(
            *common.notes,
            *_others_notes(common.others),
            *_turns_notes(steps),
            *_plan_notes(named),
            *_peak_notes(engine, [p for p, _ in planned]),
            *_after_notes(engine),
            *filter(None, [engine.eviction.note, engine.fragments.note, engine.placing.note]),
            *_drift_notes(named, clock, engine.settings.drift),
        ),
    )


def _grown(planned: Planned, came_bytes: int, budget_bytes: int) -> int:
    """The predicted peak with growth that was not planned for, which may use the margin up."""
    peak = planned.peak_bytes + came_bytes
    fits = peak - margin_bytes(budget_bytes) <= budget_bytes
    return min(peak, budget_bytes) if fits else peak


def _measured_seconds(clock: Clock, parts: list[Part]) -> float | None:
    """Measured seconds of a step; None if one of its graphs has not run under its plan."""
    found = 0.0
    for part in parts:
        seconds = part.status.times.seconds(clock)
        if seconds is None:
            return None
        found += part.step.often * seconds
    return found


def _step(planned: Planned, status: GraphStatus, calls: int, share: float) -> PlannedStep:
    return PlannedStep(
        problem=planned.problem,
        plan=planned.plan,
        program=planned.program,
        predicted=planned.predicted,
        in_core=planned.in_core,
        planning_seconds=status.planning_seconds,
        measured=status.measured,
        calls=calls,
        share=share,
    )


def _with_bound(report: Report, parts: list[Part]) -> Report:
    try:
        least = sum(part.step.often * _bound(part.status, part.planned) for part in parts)
    except MissingPackageError as error:
        return replace(report, notes=(*report.notes, f"no lower bound: {error}"))
    return replace(report, lower_bound_seconds=least)


def _bound(status: GraphStatus, planned: Planned) -> float:
    """The lower bound of the plan's problem, computed once for each plan."""
    if status.bound_seconds is None:
        least, predicted = lower_bound(planned.problem), planned.predicted.seconds
        if predicted < least <= predicted * (1 + ROUNDING):
            least = predicted  # the same sum, added up in another order
        status.bound_seconds = least
    return status.bound_seconds


GREW = (
    "planned again because this process holds {more} more than at first, such as an optimizer's "
    "state or another model"
)


RETAINED = (
    "backward was called with retain_graph after the plan was made: saved tensors stay until the "
    "last backward call, and the step may hold more than predicted"
)


OUTSTANDING = (
    "up to {now} calls were outstanding at once (their backward had not run), and no known plan "
    "has room for more than {planned} within the budget: the step may hold more than predicted, "
    "and what calls hold may be moved away until they come back, which takes time"
)


PASSED = (
    "in some step up to {now} calls were outstanding at once (their backward had not run), and the "
    "plan has room for {planned}: that step may have held more than predicted. Once two of "
    "{within} steps have more calls, outcore plans for them"
)


CROWDED = (
    "outstanding calls of other graphs, or tensors made between its calls, hold more than when it "
    "was planned, and no known plan has room for that: the step may hold more than predicted, and "
    "what calls hold may be moved away until they come back, which takes time"
)


def _named(
    graphs: list[GraphStatus], everything: list[GraphStatus]
) -> Iterator[tuple[str, GraphStatus]]:
    """(start of the notes on a graph, graph); numbers are those of the report's page."""
    numbers = {id(graph): number for number, graph in enumerate(graphs, 1)}
    for graph in everything:
        number = numbers.get(id(graph))
        name = "another graph" if number is None else f"graph {number}"
        yield f"{name}: " if len(everything) > 1 else "", graph


def _plan_notes(graphs: list[tuple[str, GraphStatus]]) -> Iterator[str]:
    """Notes on where plans come from, if the user gave a file, and what they do not account for."""
    for name, status in graphs:
        planned = status.planned
        if planned is None:
            continue
        unforeseen = status.retained and planned.retaining_bytes is None
        waited = _calls_note(status.at_once, planned)
        left_over = status.left_over(planned.problem.budget_bytes) * bool(planned.plan.moves)
        grew = GREW.format(more=format_bytes(status.growth.planned_bytes)) * bool(
            status.growth.planned_bytes
        )
        crowded = CROWDED * (status.refused.external_bytes < inf)
        notes = (planned.note, grew, RETAINED * unforeseen, waited, crowded, left_over)
        for note in filter(None, notes):
            yield name + note


def _calls_note(calls: CallsAtOnce, planned: Planned) -> str:
    """A note on more outstanding calls than there is a plan for, if there were any; else ""."""
    if calls.expected > planned.calls:
        return OUTSTANDING.format(now=calls.expected, planned=planned.calls)
    if calls.most > planned.calls:
        return PASSED.format(now=calls.most, planned=planned.calls, within=RECURS_WITHIN)
    return ""


def _peak_notes(engine: Engine, planned: list[Planned]) -> Iterator[str]:
    """A note if a step held more than was promised: then not because of its graphs."""
    measured, budget = engine.metering.peak_bytes, engine.settings.budget_bytes
    promised = max((p.peak_bytes for p in planned), default=budget)
    if measured is not None and measured > max(budget, promised):
        yield (
            f"a metered step held {format_bytes(measured)}, more than the budget of "
            f"{format_bytes(budget)}: this process holds more outside the graphs than when they "
            "were planned; create a new backend once everything else is in memory"
        )


def _after_notes(engine: Engine) -> Iterator[str]:
    """A note if more than the budget was held after backward, which plans know nothing about."""
    after, budget = engine.metering.after_bytes, engine.settings.budget_bytes
    if after is not None and after > max(budget, engine.metering.peak_bytes or 0):
        yield (
            f"a metered step held {format_bytes(after)} after the backward of all graphs, more "
            f"than the budget of {format_bytes(budget)}: no plan bounds the memory used there, "
            "such as by an optimizer's step, which needs the least with fused=True, by calls "
            "without gradients, or by the backward of what runs before the first graph"
        )


def _drift_notes(
    graphs: list[tuple[str, GraphStatus]], clock: Clock, margin: float | None
) -> Iterator[str]:
    for name, status in graphs:
        text = _drift_note(status, clock, margin)
        if text:
            yield name + text


def _drift_note(status: GraphStatus, clock: Clock, margin: float | None) -> str:
    """How far the steps of a graph were from the prediction, if beyond `margin`; else empty."""
    planned = status.planned
    if planned is None:
        return ""
    now = status.drift(clock, WATCHED_STEPS)
    drifts = now is not None and now.beyond(margin)
    if planned.replanned is None:
        kept = "; everything is kept, so there is nothing to plan again" * planned.everything_kept
        return f"{now}{kept}" if drifts else ""
    past = planned.replanned
    plan = "another plan" if past.changed else "the same plan"
    before, after = past.drift.predicted_seconds, planned.predicted.seconds
    text = (
        f"{past.drift}: planned again with measured times: {plan}, predicted "
        f"{format_seconds(after)} instead of {format_seconds(before)}"
    )
    measured = status.times.seconds(clock)
    if measured is not None:
        text += f", measured {format_seconds(measured)}"
    return text + "; this differs too, but outcore does not plan it again" * drifts
