"""view: collect all that a page shows, in the form in which the template writes it."""

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
from outcore.report.page.moved import MovedRow, explain_most, moved
from outcore.report.page.reruns import Again, reruns
from outcore.report.page.sweep import SweepView, sweep_view
from outcore.report.page.waits import CauseRow, causes, longest_waits
from outcore.units import format_bytes, format_seconds

MOVES = 60
"""How many moves are listed, over all graphs."""


@dataclass(frozen=True, slots=True)
class View:
    """All values that the template of the page uses, one field for each."""

    title: str
    headline: str
    over: bool
    """Whether a budget is exceeded: the headline is then shown as a warning."""
    summary: tuple[str, ...]
    """The sentences below the headline."""
    tiles: tuple[Tile, ...]
    figures: tuple[tuple[str, str, str], ...]
    """Rows of a table: name, predicted, measured."""
    facts: tuple[tuple[str, str], ...]
    """Rows of a table: setting or outcome, value."""
    measured: bool
    """Whether anything was measured."""
    shares: tuple[Share, ...]
    """Parts of the bar of the step's time, which takes `seconds`."""
    seconds: str
    graphs: tuple[GraphView, ...]
    legend: tuple[tuple[str, str], ...]
    """(look, name) of each kind of box in the timelines."""
    undrawn: str
    """A sentence if some graphs are not drawn; else empty."""
    process_peak: str
    """A sentence with the measured peak if no chart shows it; else empty."""
    causes: tuple[CauseRow, ...]
    """The table of waits by cause; `still` is the sentence above it."""
    still: str
    waits: tuple[tuple[str, str], ...]
    """The longest waits: (how long, why); there are `wait_count` in all."""
    wait_count: int
    wait_calls: str
    """Addition to `wait_count` if a step does not call each graph once; else empty."""
    reruns: tuple[Again, ...]
    """The ops that are recomputed longest; there are `rerun_count` in all."""
    rerun_count: int
    links: tuple[LinkRow, ...]
    contended: bool
    """Whether measured rates of links are known."""
    moves: tuple[MovedRow, ...]
    """The table of moves; `moved` gaps are moved in a step, and `held` dead ones are held."""
    moved: str
    held: str
    holds: bool
    """Whether any buffer is held for recomputations."""
    cut: bool
    """Whether the table of moves leaves some out."""
    sweep: SweepView | None
    """The chart of a sweep; None unless one was requested."""
    notes: tuple[str, ...]
    made_by: str
    """The name and version of outcore."""


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
    """(look, name) of each kind of box in the timelines."""
    drawn = {look for graph in graphs for look in graph.looks}
    return tuple((look, name) for look, name in LOOKS.items() if look in drawn)


def _undrawn(drawn: int, planned: int) -> str:
    """A sentence if some graphs are not drawn; else empty."""
    if drawn == planned:
        return ""
    return f"This page draws {drawn} of {planned} graphs: those that take longest."


def _process_peak(report: Report) -> str:
    """A sentence with the measured peak if no chart shows it, which is so for several graphs."""
    held = report.measured_peak_bytes
    if held is None or not report.several_graphs:
        return ""
    return f"The peak as measured is {format_bytes(held)}, over the whole step: all of its graphs."
