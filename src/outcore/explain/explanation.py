"""Explanation: for each buffer moved what else could be done with it, and the waits that remain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from outcore.ir.hardware import Tier


class WaitsFor(Enum):
    """What the compute stream waits for."""

    COPY_BACK = "copy back"
    """A run needs what is not back yet."""
    MEMORY = "memory"
    """What comes next has no room before a copy out is done."""
    PLAN = "plan"
    """The plan asks for a copy to be done by now: a hint `arrive` or `release`."""
    CLOCK = "clock"
    """Lowering frees memory where its clock has the copy out done; it is late."""
    END = "end"
    """The last op is done, and a copy out is not."""


class Late(Enum):
    """Why a copy that is waited for was not done sooner: what its start waited for."""

    LINK = "link"
    """The link was busy with other copies."""
    MEMORY = "memory"
    """A copy back had no room on the device any sooner."""
    HINT = "hint"
    """The plan wants it issued no sooner (`prefetch`, `depart`)."""
    CALL = "call"
    """What is written over in the backward call is fetched in that call."""
    COPY_OUT = "copy out"
    """It was not out yet when it was to come back."""
    ROOM = "room"
    """A copy out had to wait for room in the outer tier."""
    TIME = "time"
    """Nothing: it was issued as soon as can be, and takes longer than there is."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The plan with one gap changed to `choice`, and all else the same.

    `choice` is `keep`, `offload`, `recompute` or `recompute stay`, as the text form of a plan has
    it; `chosen` marks the plan's own. `seconds` are those of the whole step and `peak_bytes` the
    device's, both simulated; None where it cannot be done, and `impossible` says why.
    `over_bytes`: by how much it does not fit the budget of `over_tier`.
    """

    choice: str
    chosen: bool
    seconds: float | None = None
    peak_bytes: int | None = None
    over_bytes: int = 0
    over_tier: Tier | None = None
    impossible: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be done inside all budgets."""
        return not (self.impossible or self.over_bytes)


@dataclass(frozen=True, slots=True)
class Move:
    """One gap in which a buffer is offloaded or recomputed, and what else could be done.

    `op` made the buffer, by a call of `target` at `site` (None and empty where the caller passes
    it in). It leaves after the op `after` and is needed before the op `before`; between them lie
    `idle_seconds` of first runs. `reasons` say what each alternative would cost, in words.

    `dead`: no op needs it any more, and by default it is dropped. Up to the op `before` the plan
    holds it for what runs again, as `choice` says.
    """

    buffer: int
    name: str
    nbytes: int
    op: int | None
    target: str
    site: str
    after: int
    before: int
    dead: bool
    idle_seconds: float
    choice: str
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]

    @property
    def weight(self) -> float:
        """Byte-seconds that it frees at best, or holds if dead: what moves are sorted by."""
        return self.nbytes * self.idle_seconds

    @property
    def reason(self) -> str:
        """The reasons as one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream stands still for `seconds` from `start_seconds` of the step on.

    It waits for a copy of `buffer` before a run of `op` (None at the end of the step; `again`
    where that is not its first). `late` is why the copy, which takes `copy_seconds`, was not done
    sooner: for LINK, ROOM and COPY_OUT `behind` lists the buffers that went first, for MEMORY
    `full_op` is the op beside which it had no room (None between the two calls). `reason` says it
    in words.
    """

    waits_for: WaitsFor
    seconds: float
    start_seconds: float
    op: int | None
    again: bool
    buffer: int
    name: str
    nbytes: int
    copy_seconds: float
    late: Late
    behind: tuple[int, ...]
    full_op: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Total:
    """All waits of one cause."""

    waits_for: WaitsFor
    late: Late
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rerun:
    """An op that runs again, so many `times`, in so many seconds."""

    op: int
    target: str
    site: str
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan's account; all figures simulated.

    `seconds` of the step are `in_core_seconds` (each op once, as it runs by default), plus
    `variant_seconds` (what the plan's choice of algorithms adds; below 0 where it saves),
    `recompute_seconds` and `stall_seconds`. `moves` are those that free most, by bytes x idle
    time, of `moved` gaps and of `held` ones, in which what is dead is held for reruns; `waits` are
    in order of time, `reruns` longest first.
    """

    policy: str
    budget_bytes: int
    peak_bytes: int
    over_bytes: int
    over_tier: Tier | None
    seconds: float
    in_core_seconds: float
    variant_seconds: float
    recompute_seconds: float
    moved: int
    held: int
    moves: tuple[Move, ...]
    waits: tuple[Wait, ...]
    reruns: tuple[Rerun, ...]

    @property
    def stall_seconds(self) -> float:
        """Time in which the compute stream stands still."""
        return sum((wait.seconds for wait in self.waits), 0.0)

    @property
    def totals(self) -> tuple[Total, ...]:
        """The waits by cause, the longest first."""
        causes = dict.fromkeys((wait.waits_for, wait.late) for wait in self.waits)
        found = (_total(cause, self.waits) for cause in causes)
        return tuple(sorted(found, key=lambda total: -total.seconds))

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, as JSON has them; `stall_seconds` and `totals` besides."""
        derived = {"stall_seconds": self.stall_seconds, "totals": _plain(self.totals)}
        return {**_fields(self), **derived}

    def __str__(self) -> str:
        """The account for people: where the step goes, the moves, the waits."""
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
