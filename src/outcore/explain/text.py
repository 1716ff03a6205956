"""text: write an Explanation as plain text for people."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.explain.explanation import Explanation, Move
from outcore.explain.words import (
    buffer_words,
    cause_words,
    choice_words,
    maker_words,
    wait_words,
)
from outcore.units import format_bytes, format_seconds

SHOWN = 20
"""How many moves and waits are listed at most; the rest are only counted."""


def text(explanation: Explanation) -> str:
    """Where the time goes, then the moves that free most, then the longest waits."""
    lines = [*summary(explanation), "", *_moves(explanation), "", *_waits(explanation)]
    return "\n".join(lines)


def summary(explanation: Explanation) -> Iterator[str]:
    """The budget, the step's time by its parts, and the causes of its waits."""
    peak, budget = format_bytes(explanation.peak_bytes), format_bytes(explanation.budget_bytes)
    yield f"{explanation.policy or 'the plan'} holds at most {peak}, of a budget of {budget}"
    if explanation.over_tier is not None:
        over = format_bytes(explanation.over_bytes)
        yield f"it does not fit: {over} over on the {explanation.over_tier.value}"
    parts = [f"{format_seconds(explanation.in_core_seconds)} in-core"]
    if explanation.variant_seconds:
        parts.append(f"{format_seconds(explanation.variant_seconds)} by the choice of algorithms")
    parts += [
        f"{format_seconds(explanation.recompute_seconds)} recomputed",
        f"{format_seconds(explanation.stall_seconds)} waited",
    ]
    yield f"the step takes {format_seconds(explanation.seconds)}: {' + '.join(parts)} (simulated)"
    for total in explanation.totals:
        times = "once" if total.count == 1 else f"{total.count} times"
        yield f"  {format_seconds(total.seconds)} {cause_words(total)}, {times}"


def heading(explanation: Explanation) -> str:
    """How many gaps are moved or held for recomputations, and how many of them are shown."""
    moved, held = explanation.moved, explanation.held
    shown = min(len(explanation.moves), SHOWN)
    some = "all" if shown == moved + held else f"the first {shown}"
    also = f" and {held} held for reruns" * bool(held)
    return f"{moved} gaps are moved{also}; {some}, by bytes x idle time:"


def _moves(explanation: Explanation) -> Iterator[str]:
    if not explanation.moved + explanation.held:
        yield "everything is kept"
        return
    yield heading(explanation)
    for move in explanation.moves[:SHOWN]:
        yield f"  {move_words(move)}"
        yield f"    {move.reason}"


def move_words(move: Move) -> str:
    """What is moved, and when."""
    what = f"{buffer_words(move.buffer, move.name)}, {format_bytes(move.nbytes)}"
    made = f"{what}, {maker_words(move)}"
    choice = choice_words(move.choice, dead=move.dead)
    return f"{made}: {choice} after op {move.after} until op {move.before}"


def _waits(explanation: Explanation) -> Iterator[str]:
    if not explanation.waits:
        yield "compute waits for nothing"
        return
    longest = sorted(explanation.waits, key=lambda wait: -wait.seconds)[:SHOWN]
    yield f"compute waits {len(explanation.waits)} times; the longest:"
    for wait in longest:
        yield f"  {wait_words(wait)}"
