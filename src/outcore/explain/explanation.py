"""Explanation: alternatives to each move of a plan, and the waits that remain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from outcore.ir.hardware import Tier


class WaitsFor(Enum):
    """What the compute stream waits for."""

    COPY_BACK = "copy back"
    """A run needs data that is not back yet."""
    MEMORY = "memory"
    """What comes next has no room until a copy out is done."""
    PLAN = "plan"
    """The plan requires a copy to be done by now, by a hint `arrive` or `release`."""
    CLOCK = "clock"
    """Lowering frees memory at the time at which it expects a copy out to be done; it is late."""
    END = "end"
    """The last op is done, and a copy out is not."""


class Late(Enum):
    """Why a copy that is waited for was not done sooner: what its start waited for."""

    LINK = "link"
    """The link was busy with other copies."""
    MEMORY = "memory"
    """The device had no room for a copy back any sooner."""
    HINT = "hint"
    """The plan issues the copy no sooner (`prefetch`, `depart`)."""
    CALL = "call"
    """The backward call overwrites the buffer, so the copy back is issued in that call."""
    COPY_OUT = "copy out"
    """The copy back was due before the copy out was done."""
    ROOM = "room"
    """A copy out had to wait for room in the outer tier."""
    TIME = "time"
    """Nothing: it was issued as soon as possible, but takes longer than the time there is."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The plan with the choice for one gap changed to `choice`, and all else unchanged."""

    choice: str
    """`keep`, `offload`, `recompute` or `recompute stay`, as in the text form of a plan."""
    chosen: bool
    """Whether this is what the plan does."""
    seconds: float | None = None
    """Simulated time of the whole step; None if the choice is impossible."""
    peak_bytes: int | None = None
    """Simulated peak of the device; None if the choice is impossible."""
    over_bytes: int = 0
    """By how much it exceeds the budget of `over_tier`; 0 if it fits."""
    over_tier: Tier | None = None
    """The first tier whose budget it exceeds; None if it fits."""
    impossible: str = ""
    """Why the choice is impossible; empty if it is possible."""

    @property
    def fits(self) -> bool:
        """Whether it is possible within all budgets."""
        return not (self.impossible or self.over_bytes)


@dataclass(frozen=True, slots=True)
class Move:
    """One gap for which a plan departs from the default, and what else could be done.

    The default is to keep the buffer; the plan offloads or recomputes it. If the gap is `dead`, no
    op needs the buffer any more, and the default is to drop it; the plan holds it until the op
    `before`, for recomputations, in the way that `choice` says.
    """

    buffer: int
    name: str
    """Name of the buffer in the trace; may be empty."""
    nbytes: int
    op: int | None
    """The op that makes the buffer; None if the caller passes it in."""
    target: str
    """What that op calls; empty if `op` is None."""
    site: str
    """The op's place in the model; empty if not known."""
    after: int
    """The last op that uses the buffer before the gap."""
    before: int
    """The op that needs the buffer again."""
    dead: bool
    idle_seconds: float
    """Time of the ops inside the gap, without recomputations."""
    choice: str
    """The plan's choice, named as in `Alternative.choice`."""
    alternatives: tuple[Alternative, ...]
    """Every choice for the gap, the plan's own included."""
    reasons: tuple[str, ...]
    """What each alternative to the plan's choice would cost, in words."""

    @property
    def weight(self) -> float:
        """Bytes x idle time: what it frees at best, or holds if dead. Moves are sorted by this."""
        return self.nbytes * self.idle_seconds

    @property
    def reason(self) -> str:
        """The reasons as one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which the compute stream waits for a copy."""

    waits_for: WaitsFor
    seconds: float
    """How long compute waits."""
    start_seconds: float
    """When the wait begins, from the start of the step."""
    op: int | None
    """The op before whose run compute waits; None at the end of the step."""
    again: bool
    """Whether that run is a recomputation."""
    buffer: int
    """The buffer whose copy compute waits for."""
    name: str
    nbytes: int
    copy_seconds: float
    """How long that copy takes."""
    late: Late
    """Why the copy was not done sooner."""
    behind: tuple[int, ...]
    """Buffers whose copies went first, if `late` is LINK, ROOM or COPY_OUT."""
    full_op: int | None
    """If `late` is MEMORY: the op whose run left no room; None means between the two calls."""
    reason: str
    """The wait and its cause in words."""


@dataclass(frozen=True, slots=True)
class Total:
    """All waits of one cause."""

    waits_for: WaitsFor
    late: Late
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rerun:
    """An op that is recomputed `times` times, which takes `seconds` in total."""

    op: int
    target: str
    site: str
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that explains a plan. All figures are simulated.

    `seconds` is the sum of `in_core_seconds`, `variant_seconds`, `recompute_seconds` and
    `stall_seconds`.
    """

    policy: str
    budget_bytes: int
    peak_bytes: int
    over_bytes: int
    """By how much the plan exceeds the budget of `over_tier`; 0 if it fits."""
    over_tier: Tier | None
    """The first tier whose budget is exceeded; None if the plan fits."""
    seconds: float
    in_core_seconds: float
    """Time of each op once, by its default variant."""
    variant_seconds: float
    """What the plan's choice of variants (algorithms) adds; below 0 if it saves time."""
    recompute_seconds: float
    moved: int
    """Number of gaps in which a buffer is offloaded or recomputed."""
    held: int
    """Number of dead gaps in which a buffer is held for recomputations."""
    moves: tuple[Move, ...]
    """The moves that free most (bytes x idle time), of both kinds of gaps."""
    waits: tuple[Wait, ...]
    """In order of time."""
    reruns: tuple[Rerun, ...]
    """Recomputed ops, the longest first."""

    @property
    def stall_seconds(self) -> float:
        """Time in which the compute stream waits."""
        return sum((wait.seconds for wait in self.waits), 0.0)

    @property
    def totals(self) -> tuple[Total, ...]:
        """The waits by cause, the longest first."""
        causes = dict.fromkeys((wait.waits_for, wait.late) for wait in self.waits)
        found = (_total(cause, self.waits) for cause in causes)
        return tuple(sorted(found, key=lambda total: -total.seconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, as in JSON, plus `stall_seconds` and `totals`."""
        derived = {"stall_seconds": self.stall_seconds, "totals": _plain(self.totals)}
        return {**_fields(self), **derived}

    def __str__(self) -> str:
        """The account for people: where the time goes, the moves, the waits."""
        from outcore.explain.text import text  # noqa: PLC0415 - it reads this module

        return text(self)


def _total(cause: tuple[WaitsFor, Late], waits: Iterable[Wait]) -> Total:
    found = [wait.seconds for wait in waits if (wait.waits_for, wait.late) == cause]
    return Total(*cause, len(found), sum(found))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _fields(value) if is_dataclass(value) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
