"""view: all that a page shows, as the template writes it down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from outcore.explain import Explanation, Move, Total, Wait, explain
from outcore.report.figures import Report
from outcore.report.page import words
from outcore.report.page.graph import GraphView, graph_view
from outcore.report.page.sweep import SweepView, sweep_view
from outcore.units import format_bytes, format_seconds

MOVES = 60
"""So many moves are listed, over all graphs, and as many waits at most."""
WAITS = 20
MARKS = 2400
"""About so many boxes are drawn, over all graphs: 200 bytes each."""
SMALL = 0.005
"""Parts of the step below this are not drawn in the bar, only named."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the step's time."""

    name: str
    look: str
    text: str
    percent: float


@dataclass(frozen=True, slots=True)
class Cause:
    """All waits with one cause."""

    seconds: float
    text: str
    percent: str
    count: int
    what: str
    why: str
    advice: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A row of the table of what is moved. Numbers are what the columns are sorted by."""

    name: str
    place: str
    nbytes: int
    size: str
    choice: str
    idle: float
    idle_text: str
    between: str
    weight: float
    weight_text: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A page."""

    title: str
    headline: str
    summary: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]
    measured: bool
    shares: tuple[Share, ...]
    seconds: str
    graphs: tuple[GraphView, ...]
    causes: tuple[Cause, ...]
    waited: str
    waits: tuple[tuple[str, str], ...]
    wait_count: int
    moves: tuple[Moved, ...]
    moved: int
    sweep: SweepView | None
    notes: tuple[str, ...]
    made_by: str


def view_of(report: Report) -> View:
    """What the page of `report` shows. Explains `MOVES` moves."""
    steps = report.steps
    most = MOVES // max(1, len(steps))
    explained = [explain(step.problem, step.plan, most=most) for step in steps]
    marks = MARKS // max(1, len(steps))
    seconds = sum(each.seconds for each in explained)
    return View(
        title=report.title or "A training step under a memory budget",
        headline=words.headline(report),
        summary=tuple(words.summary(report, explained)),
        figures=tuple(_figures(report)),
        measured=report.measured_seconds is not None or report.measured_peak_bytes is not None,
        shares=tuple(_shares(explained, seconds)),
        seconds=format_seconds(seconds),
        graphs=tuple(
            graph_view(report, step, f"Graph {i} of {len(steps)}" if len(steps) > 1 else "", marks)
            for i, step in enumerate(steps, 1)
        ),
        causes=tuple(_causes(explained, seconds)),
        waited=format_seconds(sum(each.stall_seconds for each in explained)),
        waits=tuple(_waits(explained)),
        wait_count=sum(len(each.waits) for each in explained),
        moves=tuple(_moves(explained)),
        moved=sum(each.moved for each in explained),
        sweep=None if report.sweep is None else sweep_view(report.sweep, report),
        notes=report.notes,
        made_by=f"outcore {_version()}",
    )


def _version() -> str:
    try:
        return version("outcore")
    except PackageNotFoundError:
        return ""


def _figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Rows of a table: what, predicted, measured."""
    text, size = words.seconds_text, words.bytes_text
    yield "time of a step", text(report.predicted_seconds), text(report.measured_seconds)
    yield "time with everything kept", text(report.in_core_seconds), ""
    if report.lower_bound_seconds is not None:
        yield "time that no plan can beat", text(report.lower_bound_seconds), ""
    yield "peak memory", size(report.predicted_peak_bytes), size(report.measured_peak_bytes)
    yield "budget", words.spell_budget(report.budget_bytes), ""
    yield "peak with everything kept", size(report.in_core_peak_bytes), ""
    yield "of that, held through the step", size(report.resident_bytes), ""
    yield "offloaded in a step", size(report.offloaded_bytes), ""
    counts = report.counts
    kept = f"{counts.keep} / {counts.offload} / {counts.recompute}"
    yield "tensors kept / offloaded / recomputed between forward and backward", kept, ""
    yield "policy", report.policy, ""
    yield "planning", text(report.planning_seconds), ""


def _shares(explained: Sequence[Explanation], seconds: float) -> Iterator[Share]:
    """The step by what takes its time; they add up to it."""
    parts = (
        ("computing", "forward", sum(e.in_core_seconds + e.variant_seconds for e in explained)),
        ("computing again", "rerun", sum(e.recompute_seconds for e in explained)),
        ("waiting for copies", "wait", sum(e.stall_seconds for e in explained)),
    )
    for name, look, part in parts:
        share = part / seconds if seconds else 0.0
        text = f"{format_seconds(part)} ({100 * share:.1f}%)"
        yield Share(name, look, text, 100 * share if share > SMALL else 0.0)


def _causes(explained: Sequence[Explanation], seconds: float) -> Iterator[Cause]:
    """Causes of waits over all graphs, the longest first."""
    found: dict[tuple[str, str], list[Total]] = {}
    for total in (total for each in explained for total in each.totals):
        key = (total.waits_for.value, total.late.value)
        found.setdefault(key, []).append(total)
    causes = [_cause(totals, seconds) for totals in found.values()]
    yield from sorted(causes, key=lambda cause: -cause.seconds)


def _cause(totals: Sequence[Total], seconds: float) -> Cause:
    waited = sum(total.seconds for total in totals)
    return Cause(
        waited,
        format_seconds(waited),
        f"{100 * waited / seconds:.1f}%" if seconds else "-",
        sum(total.count for total in totals),
        words.wait_what(totals[0]),
        words.wait_why(totals[0]),
        words.wait_try(totals[0]),
    )


def _waits(explained: Sequence[Explanation]) -> Iterator[tuple[str, str]]:
    """The longest waits: how long, and why."""
    found: list[Wait] = [wait for each in explained for wait in each.waits]
    for wait in sorted(found, key=lambda wait: -wait.seconds)[:WAITS]:
        yield format_seconds(wait.seconds), wait.reason


def _moves(explained: Sequence[Explanation]) -> Iterator[Moved]:
    for number, each in enumerate(explained, 1):
        graph = f"graph {number}, " if len(explained) > 1 else ""
        for move in each.moves:
            yield _moved(move, graph)


def _moved(move: Move, graph: str) -> Moved:
    made = "passed in" if move.op is None else f"op {move.op} {move.target}"
    return Moved(
        name=f"{move.name} (buffer {move.buffer})".strip(),
        place=f"{graph}{made}" + (f", {move.site}" if move.site else ""),
        nbytes=move.nbytes,
        size=format_bytes(move.nbytes),
        choice=move.choice,
        idle=move.idle_seconds,
        idle_text=format_seconds(move.idle_seconds),
        between=f"after op {move.after} until op {move.before}",
        weight=move.weight,
        weight_text=f"{format_bytes(move.weight)} s",
        reasons=move.reasons,
    )
