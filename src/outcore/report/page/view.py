"""view: all that a page shows, as the template writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from outcore.report.figures import Report
from outcore.report.page import words
from outcore.report.page.account import (
    Account,
    seconds_of,
    stall_seconds_of,
    times_text,
    total,
)
from outcore.report.page.figures import Share, Tile, facts, figures, shares, tiles
from outcore.report.page.graph import GraphView
from outcore.report.page.graphs import graph_views
from outcore.report.page.links import LinkRow, link_rows
from outcore.report.page.marks import LOOKS
from outcore.report.page.moved import Moved, explain_most, moved
from outcore.report.page.reruns import Again, reruns
from outcore.report.page.sweep import SweepView, sweep_view
from outcore.report.page.waits import Cause, causes, longest_waits
from outcore.units import format_bytes, format_seconds

MOVES = 60
"""So many moves are listed, of all graphs together."""


@dataclass(frozen=True, slots=True)
class View:
    """A page."""

    title: str
    headline: str
    over: bool
    summary: tuple[str, ...]
    tiles: tuple[Tile, ...]
    figures: tuple[tuple[str, str, str], ...]
    facts: tuple[tuple[str, str], ...]
    measured: bool
    shares: tuple[Share, ...]
    seconds: str
    graphs: tuple[GraphView, ...]
    legend: tuple[tuple[str, str], ...]
    undrawn: str
    process_peak: str
    causes: tuple[Cause, ...]
    still: str
    waits: tuple[tuple[str, str], ...]
    wait_count: int
    wait_calls: str
    reruns: tuple[Again, ...]
    rerun_count: int
    links: tuple[LinkRow, ...]
    contended: bool
    moves: tuple[Moved, ...]
    moved: str
    held: str
    holds: bool
    cut: bool
    sweep: SweepView | None
    notes: tuple[str, ...]
    made_by: str


def view_of(report: Report) -> View:
    """What the page of `report` shows. Explains `MOVES` moves."""
    explained = explain_most(report.steps, MOVES)
    often = [step.often for step in report.steps]
    accounts = [Account(*each) for each in zip(explained, often, strict=True)]
    seconds = seconds_of(accounts)
    graphs, shown = graph_views(report), tuple(moved(explained))
    return View(
        title=report.title or "A training step under a memory budget",
        headline=words.headline(report),
        over=words.is_over(report),
        summary=tuple(words.summary(report, accounts)),
        tiles=tuple(tiles(report)),
        figures=tuple(figures(report)),
        facts=tuple(facts(report)),
        measured=report.measured_seconds is not None or report.measured_peak_bytes is not None,
        shares=tuple(shares(accounts, seconds)),
        seconds=format_seconds(seconds),
        graphs=graphs,
        legend=_legend(graphs),
        undrawn=_undrawn(len(graphs), len(report.steps)),
        process_peak=_process_peak(report),
        causes=tuple(causes(accounts, report.policy)),
        still=words.still(report, stall_seconds_of(accounts)),
        waits=tuple(longest_waits(explained)),
        wait_count=sum(len(each.waits) for each in explained),
        wait_calls=", in one call of each graph" * any(each != 1 for each in often),
        reruns=tuple(reruns(accounts)),
        rerun_count=sum(len(each.reruns) for each in explained),
        links=tuple(link_rows(report)),
        contended=any(link.measured_rate is not None for link in report.links),
        moves=shown,
        moved=times_text(total(accounts, lambda each: each.moved)),
        held=times_text(total(accounts, lambda each: each.held)),
        holds=any(each.held for each in explained),
        cut=len(shown) < sum(each.moved + each.held for each in explained),
        sweep=None if report.sweep is None else sweep_view(report.sweep, report),
        notes=report.notes,
        made_by=f"outcore {_version()}",
    )


def _version() -> str:
    try:
        return version("outcore")
    except PackageNotFoundError:
        return ""


def _legend(graphs: Sequence[GraphView]) -> tuple[tuple[str, str], ...]:
    """(look, name) of what is drawn in the timelines."""
    drawn = {look for graph in graphs for look in graph.looks}
    return tuple((look, name) for look, name in LOOKS.items() if look in drawn)


def _undrawn(drawn: int, planned: int) -> str:
    """That some graphs are not drawn, if some are not."""
    if drawn == planned:
        return ""
    return f"Drawn are {drawn} of {planned} graphs: those that take longest."


def _process_peak(report: Report) -> str:
    """The measured peak, where it is in no chart: it is not that of one of several graphs."""
    held = report.measured_peak_bytes
    if held is None or not report.several_graphs:
        return ""
    return f"Measured was a peak of {format_bytes(held)}, over the whole step: all of its graphs."
