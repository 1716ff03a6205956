"""reruns: what is computed again, over all graphs of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from outcore.explain import Explanation, Rerun
from outcore.units import format_seconds

MOST = 10
"""So many ops are listed."""


class Again(NamedTuple):
    """A row of the table of what is computed again."""

    op: str
    place: str
    times: int
    text: str
    percent: str


def reruns(calls: Sequence[Explanation]) -> list[Again]:
    """The ops that take the longest to compute again; a graph is in `calls` as often as it runs."""
    seconds = sum(each.seconds for each in calls)
    return [
        Again(
            _name(rerun),
            graph + rerun.site,
            rerun.times,
            format_seconds(rerun.seconds),
            f"{100 * rerun.seconds / seconds:.1f}%" if seconds else "-",
        )
        for graph, rerun in sorted(_all(calls), key=lambda item: -item[1].seconds)[:MOST]
    ]


def _in_all(rerun: Rerun, calls: int) -> Rerun:
    return replace(rerun, times=rerun.times * calls, seconds=rerun.seconds * calls)


def longest_rerun(calls: Sequence[Explanation]) -> str | None:
    """The op that takes the longest to compute again, where it is, and how long; None: nothing."""
    _, longest = max(_all(calls), key=lambda item: item[1].seconds, default=("", None))
    if longest is None:
        return None
    place = f", {longest.site}" if longest.site else ""
    often = "" if longest.times == 1 else f" in {longest.times} runs"
    return f"{_name(longest)}{place}, {format_seconds(longest.seconds)}{often}"


def _all(calls: Sequence[Explanation]) -> Iterator[tuple[str, Rerun]]:
    """Each rerun once, in all calls of its graph."""
    often = Counter(map(id, calls))
    for number, each in enumerate({id(each): each for each in calls}.values(), 1):
        graph = f"graph {number}, " if len(often) > 1 else ""
        yield from ((graph, _in_all(rerun, often[id(each)])) for rerun in each.reruns)


def _name(rerun: Rerun) -> str:
    return f"op {rerun.op} {rerun.target}"
