"""figures: the numbers of a page: tiles, predicted and measured figures, and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.report.figures import Report
from outcore.report.page import words
from outcore.report.page.account import Account, stall_seconds_of, total
from outcore.units import format_seconds

SMALL = 0.005
"""A part of the step below this fraction is named but not drawn in the bar."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the most important numbers; `look` is `over` if the number is bad."""

    value: str
    name: str
    note: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the step's time, as drawn in the bar."""

    name: str
    look: str
    text: str
    percent: float


def tiles(report: Report) -> Iterator[Tile]:
    """The numbers that a reader looks for first."""
    predicted, kept = report.predicted_seconds, report.in_core_seconds
    if predicted is None:
        return
    took = report.measured_seconds
    note = f"measured {format_seconds(took)}" if took is not None else "predicted"
    yield Tile(format_seconds(predicted), "time of a step", note)
    yield Tile(
        words.ratio(predicted, kept),
        "of the time with everything kept",
        f"which is {words.seconds_text(kept)}",
    )
    yield _peak(report)
    needs = words.bytes_text(report.in_core_peak_bytes)
    yield Tile(needs, "with everything kept", "peak, predicted")


def _peak(report: Report) -> Tile:
    """The measured peak if there is one, else the predicted one.

    The budget is known: there is a predicted time, so there is a plan.
    """
    held = report.measured_peak_bytes
    known = held if held is not None else report.predicted_peak_bytes
    note = "measured" if held is not None else "predicted"
    budget = words.spell_budget(report.budget_bytes)
    look = "over" if known is not None and known > report.budget_bytes else ""
    return Tile(words.bytes_text(known), f"peak of a budget of {budget}", note, look)


def figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Rows of a table: name, predicted, measured."""
    text, size = words.seconds_text, words.bytes_text
    yield "time of a step", text(report.predicted_seconds), _known(text(report.measured_seconds))
    yield "time with everything kept", text(report.in_core_seconds), ""
    if report.lower_bound_seconds is not None:
        yield "time that no plan can beat", text(report.lower_bound_seconds), ""
    peak = size(report.predicted_peak_bytes)
    yield "peak memory", peak, _known(size(report.measured_peak_bytes))
    yield "of that, held through the step", size(report.resident_bytes), ""
    yield "peak with everything kept", size(report.in_core_peak_bytes), ""
    yield "offloaded in a step", size(report.offloaded_bytes), ""


def _known(text: str) -> str:
    return "" if text == "-" else text


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Settings, and what they led to, that are neither predicted nor measured in a step."""
    yield "budget", words.spell_budget(report.budget_bytes)
    yield "policy", report.policy
    counts = report.counts
    kept = f"{counts.keep} / {counts.offload} / {counts.recompute}"
    yield "tensors kept / offloaded / recomputed between forward and backward", kept
    if report.held:
        yield "tensors held for what is computed again", str(report.held)
    if report.planning_seconds is not None:
        yield "planning took", format_seconds(report.planning_seconds)
    if report.capture_seconds is not None:
        yield "capture took", format_seconds(report.capture_seconds)
    if report.graphs > 1:
        turns = any(step.share < 1 for step in report.steps)
        yield (
            "graphs, some of which take turns" if turns else "graphs in a step",
            str(report.graphs),
        )
    if report.replans:
        yield "planned again", f"{report.replans} of the graphs, as their time drifted"
    if report.disk_bytes_written:
        yield "written to disk so far", words.bytes_text(report.disk_bytes_written)


def shares(accounts: Sequence[Account], seconds: float) -> Iterator[Share]:
    """The parts of the step's time. They add up to `seconds`; parts of 0 are left out."""
    once = total(accounts, lambda each: each.in_core_seconds + each.variant_seconds)
    parts = (
        ("computing", "forward", once),
        ("computing again", "rerun", total(accounts, lambda each: each.recompute_seconds)),
        ("waiting for copies", "wait", stall_seconds_of(accounts)),
    )
    for name, look, part in (each for each in parts if each[2]):
        share = part / seconds if seconds else 0.0
        text = f"{format_seconds(part)} ({100 * share:.1f}%)"
        yield Share(name, look, text, 100 * share if share > SMALL else 0.0)
