"""reruns: what is computed again, over all graphs of a step."""

from __future__ import annotations

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


def reruns(explained: Sequence[Explanation], calls: Sequence[int]) -> list[Again]:
    """The ops that take the longest to compute again, in all `calls` that a step has of a graph."""
    seconds = sum(each.seconds * often for each, often in zip(explained, calls, strict=True))
    whole = [
        replace(each, reruns=tuple(_in_all(rerun, often) for rerun in each.reruns))
        for each, often in zip(explained, calls, strict=True)
    ]
    return [
        Again(
            _name(rerun),
            graph + rerun.site,
            rerun.times,
            format_seconds(rerun.seconds),
            f"{100 * rerun.seconds / seconds:.1f}%" if seconds else "-",
        )
        for graph, rerun in sorted(_all(whole), key=lambda item: -item[1].seconds)[:MOST]
    ]


def _in_all(rerun: Rerun, calls: int) -> Rerun:
    return replace(rerun, times=rerun.times * calls, seconds=rerun.seconds * calls)


def longest_rerun(explained: Sequence[Explanation]) -> str | None:
    """The op that takes the longest to compute again, where it is, and how long; None: nothing."""
    _, longest = max(_all(explained), key=lambda item: item[1].seconds, default=("", None))
    if longest is None:
        return None
    place = f", {longest.site}" if longest.site else ""
    often = "" if longest.times == 1 else f" in {longest.times} runs"
    return f"{_name(longest)}{place}, {format_seconds(longest.seconds)}{often}"


def _all(explained: Sequence[Explanation]) -> Iterator[tuple[str, Rerun]]:
    for number, each in enumerate(explained, 1):
        graph = f"graph {number}, " if len(explained) > 1 else ""
        yield from ((graph, rerun) for rerun in each.reruns)


def _name(rerun: Rerun) -> str:
    return f"op {rerun.op} {rerun.target}"
