"""reruns: the table of what is recomputed, over all graphs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outcore.explain import Rerun
from outcore.report.page.account import Account, seconds_of, times_text
from outcore.units import format_seconds

MOST = 10
"""How many ops are listed."""


class Again(NamedTuple):
    """A row of the table of recomputed ops."""

    op: str
    place: str
    times: str
    text: str
    percent: str


class _Found(NamedTuple):
    """How often one op is recomputed in a step, and for how long, on average."""

    graph: str
    rerun: Rerun
    times: float
    seconds: float


def reruns(accounts: Sequence[Account]) -> list[Again]:
    """The ops whose recomputation takes longest, over all calls of a step."""
    seconds = seconds_of(accounts)
    return [
        Again(
            _name(found.rerun),
            found.graph + found.rerun.site,
            times_text(found.times),
            format_seconds(found.seconds),
            f"{100 * found.seconds / seconds:.1f}%" if seconds else "-",
        )
        for found in sorted(_all(accounts), key=lambda found: -found.seconds)[:MOST]
    ]


def longest_rerun(accounts: Sequence[Account]) -> str | None:
    """The op whose recomputation takes longest, with its place and time; None if there is none."""
    longest = max(_all(accounts), key=lambda found: found.seconds, default=None)
    if longest is None:
        return None
    place = f", {longest.rerun.site}" if longest.rerun.site else ""
    often = "" if longest.times == 1 else f" in {times_text(longest.times)} runs"
    return f"{_name(longest.rerun)}{place}, {format_seconds(longest.seconds)}{often}"


def _all(accounts: Sequence[Account]) -> Iterator[_Found]:
    """Each op that runs again, once per graph."""
    for number, (explained, often) in enumerate(accounts, 1):
        graph = f"graph {number}, " if len(accounts) > 1 else ""
        for rerun in explained.reruns:
            yield _Found(graph, rerun, rerun.times * often, rerun.seconds * often)


def _name(rerun: Rerun) -> str:
    return f"op {rerun.op} {rerun.target}"
