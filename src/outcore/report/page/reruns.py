"""reruns: what is computed again, over all graphs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def reruns(explained: Sequence[Explanation]) -> list[Again]:
    """The ops that take the longest to compute again."""
    seconds = sum(each.seconds for each in explained)
    return [
        Again(
            _name(rerun),
            graph + rerun.site,
            rerun.times,
            format_seconds(rerun.seconds),
            f"{100 * rerun.seconds / seconds:.1f}%" if seconds else "-",
        )
        for graph, rerun in sorted(_all(explained), key=lambda item: -item[1].seconds)[:MOST]
    ]


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
