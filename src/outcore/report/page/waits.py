"""waits: why compute waits, over all graphs of a step, and what to try against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.explain import Explanation, Late, WaitsFor
from outcore.report.page.account import Account, seconds_of, times_text
from outcore.units import format_seconds

MOST = 20
"""How many waits are listed one by one."""
SEARCH = "search"

_WHAT = {
    WaitsFor.COPY_BACK: "Compute needs data that is not back on the device yet",
    WaitsFor.MEMORY: "Compute needs memory that is not free until a copy out is done",
    WaitsFor.PLAN: "The plan asks compute to wait here for a copy",
    WaitsFor.CLOCK: "Memory is given back here, and its copy out is later than expected",
    WaitsFor.END: "All is computed, and a copy out is still under way",
}
_WHY = {
    Late.LINK: "the link was busy with other copies",
    Late.MEMORY: "there was no room on the device to fetch it sooner",
    Late.HINT: "the plan does not start the copy sooner",
    Late.CALL: "it is overwritten in the backward pass, so it is fetched there",
    Late.COPY_OUT: "it was still on its way out",
    Late.ROOM: "its room in the outer memory was still in use",
    Late.TIME: "the copy started as early as possible, and takes longer than the time available",
}
_TRY = {
    Late.LINK: "Move less: raise the budget, or use a policy that recomputes more (search weighs "
    "both). A faster link helps as well; outcore doctor shows how fast this machine's is.",
    Late.MEMORY: "Raise the budget a little: the memory in the way is that of the op before it. "
    "A smaller batch helps too.",
    Late.HINT: "Try the policy search, which looks for better moments.",
    Late.CALL: "Raise the budget, so that it can stay.",
    Late.COPY_OUT: "It comes back too soon to be worth the trip: raise the budget, or try search.",
    Late.ROOM: "Give the outer memory more room: host_budget, or disk_budget.",
    Late.TIME: "The link is slow compared to compute: recompute instead, or raise the budget.",
}
_SEARCHED = {
    Late.LINK: "Raise the budget, so that less is moved. A faster link helps as well; outcore "
    "doctor shows how fast this machine's is.",
    Late.HINT: "Raise the budget: search found no better moment.",
    Late.COPY_OUT: "It comes back too soon to be worth the trip: raise the budget.",
}
"""Advice that replaces `_TRY` for users of the policy search."""


@dataclass(frozen=True, slots=True)
class Waited:
    """All waits of a step with one cause. `count` is an average."""

    waits_for: WaitsFor
    late: Late
    count: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CauseRow:
    """A row of the table: all waits with one cause, as text."""

    text: str
    percent: str
    count: str
    what: str
    why: str
    advice: str


def totals(accounts: Sequence[Account]) -> list[Waited]:
    """The waits of a step by cause, the longest first."""
    found: dict[tuple[WaitsFor, Late], Waited] = {}
    for explained, often in accounts:
        for each in explained.totals:
            key = each.waits_for, each.late
            known = found.get(key, Waited(*key))
            count, seconds = often * each.count, often * each.seconds
            found[key] = Waited(*key, known.count + count, known.seconds + seconds)
    return sorted(found.values(), key=lambda waited: -waited.seconds)


def causes(accounts: Sequence[Account], policy: str) -> Iterator[CauseRow]:
    """A row for each cause, the longest first. The advice is for a user of `policy`."""
    seconds = seconds_of(accounts)
    for waited in totals(accounts):
        yield CauseRow(
            format_seconds(waited.seconds),
            f"{100 * waited.seconds / seconds:.1f}%" if seconds else "-",
            times_text(waited.count),
            _WHAT[waited.waits_for],
            _WHY[waited.late],
            advice(waited.late, policy),
        )


def advice(late: Late, policy: str) -> str:
    """What to try; never the policy that is in use."""
    return _SEARCHED.get(late, _TRY[late]) if is_search(policy) else _TRY[late]


def is_search(policy: str) -> bool:
    """Whether a spec names `search`, with or without options."""
    return policy.partition("{")[0] == SEARCH


def longest_waits(explained: Sequence[Explanation]) -> Iterator[tuple[str, str]]:
    """The longest waits: (how long, why)."""
    found = [wait for each in explained for wait in each.waits]
    for wait in sorted(found, key=lambda wait: -wait.seconds)[:MOST]:
        yield format_seconds(wait.seconds), wait.reason


def why_text(waited: Waited) -> str:
    """What compute waits for, and why that was late."""
    return f"{_WHAT[waited.waits_for]}: {_WHY[waited.late]}"
