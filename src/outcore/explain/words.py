"""words: phrase the figures of an explanation in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outcore.explain.explanation import Alternative, Late, Move, Total, Wait, WaitsFor
from outcore.ir.hardware import Tier
from outcore.units import format_bytes, format_seconds

EQUAL = 1e-9
"""Relative difference below which two steps count as equally long."""

_DONE = {
    "keep": "kept",
    "offload": "offloaded",
    "recompute": "recomputed",
    "recompute stay": "recomputed and then kept",
}
_DONE_DEAD = {**_DONE, "recompute": "dropped"}

_FOR = {
    WaitsFor.COPY_BACK: "for copies back",
    WaitsFor.MEMORY: "for copies out, to free memory,",
    WaitsFor.PLAN: "for copies, as the plan asks,",
    WaitsFor.CLOCK: "for copies out, expected to be done,",
    WaitsFor.END: "for copies out, at the end,",
}
_LATE = {
    Late.LINK: "that came after others on the link",
    Late.MEMORY: "that had no room earlier",
    Late.HINT: "that the plan does not issue earlier",
    Late.CALL: "that belong in the backward call",
    Late.COPY_OUT: "of data that was not copied out yet",
    Late.ROOM: "that had no room in the outer tier earlier",
    Late.TIME: "that were issued as early as possible",
}


def choice_words(choice: str, *, dead: bool) -> str:
    """What is done with a buffer, named as in the text form, and for what if the gap is dead."""
    return f"{choice} for reruns" if dead else choice


def reasons(alternatives: Sequence[Alternative], *, dead: bool = False) -> tuple[str, ...]:
    """What each alternative to the chosen one would cost.

    If both ways to recompute cost the same, they are named once. `alternatives` includes the chosen
    one. `dead` says that they are for a dead gap.
    """
    done = _DONE_DEAD if dead else _DONE
    chosen = next(a for a in alternatives if a.chosen)
    others = [a for a in alternatives if not a.chosen]
    said: dict[str, str] = {}
    for other in others:
        what = _outcome(other, chosen)
        if said.get("recompute") != what or other.choice != "recompute stay":
            said[other.choice] = what
    return tuple(f"if {done[choice]}, {what}" for choice, what in said.items())


def _outcome(other: Alternative, chosen: Alternative) -> str:
    if other.impossible:
        return f"it is impossible: {other.impossible}"
    if other.over_tier is not None:
        where = "" if other.over_tier is Tier.DEVICE else f" on the {other.over_tier.value}"
        return f"it would not fit: {format_bytes(other.over_bytes)} over{where}"
    return f"the step takes {longer(other.seconds, chosen.seconds)}"


def longer(seconds: float | None, than: float | None) -> str:
    """How much longer one step takes than another, in words."""
    more = (seconds or 0.0) - (than or 0.0)
    if math.isclose(seconds or 0.0, than or 0.0, rel_tol=EQUAL):
        return "as long"
    return f"{format_seconds(abs(more))} {'longer' if more > 0 else 'less'}"


def buffer_words(buffer: int, name: str) -> str:
    """A buffer by its number, and by its name if it has one."""
    return f"{name} (buffer {buffer})" if name else f"buffer {buffer}"


def maker_words(move: Move) -> str:
    """The op that made what is moved, and its place in the model."""
    if move.op is None:
        return "passed in by the caller"
    return f"op {move.op} {move.target}" + (f" at {move.site}" if move.site else "")


def cause_words(total: Total) -> str:
    """The cause of some waits, in words."""
    return f"{_FOR[total.waits_for]} {_LATE[total.late]}"


def wait_words(wait: Wait) -> str:
    """A wait and its cause, as one line."""
    return f"{format_seconds(wait.seconds)} {wait.reason}"
