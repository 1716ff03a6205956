"""Plan: what happens to each buffer in each idle gap between two of its uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from outcore.ir.hardware import Tier


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """The idle stretch of `buffer` after op `after` used it and before op `before` does.

    `dead`: no op uses it any more. Until op `before` it can serve recomputations, of what is larger
    or of what takes long to make, so that it may be worth its memory or its copies all the same.
    """

    buffer: int
    after: int
    before: int
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """Stay on the device."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Leave for `tier` and come back.

    Four hints, all op ids, in order of time. `depart`: the copy out is issued before this op runs,
    and the buffer holds its memory until then; None is right after the use, and the op of that use
    itself is beside it. `release`: the device memory is free again before this op runs, waiting for
    the copy if need be. `prefetch`: the copy back is issued before this op. `arrive`: compute waits
    for the copy back before this op runs, though only a later one needs it. Where `release` or
    `prefetch` is None, or where memory does not allow a hint, lowering decides (`lower/release.py`,
    `prefetch.py`).
    """

    tier: Tier
    depart: int | None = None
    release: int | None = None
    prefetch: int | None = None
    arrive: int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop, and run the producing op again when needed. In a dead gap: drop.

    `stay`: where the buffer comes to life inside the gap as an input of another recomputation, it
    stays for the next use (speed-centric, SuperNeurons section 3.4); otherwise it is freed at its
    last reader inside that recomputation and made again (memory-centric).
    """

    stay: bool = False


Choice: TypeAlias = Keep | Offload | Recompute


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice per gap, sorted by gap; one that is absent is kept, or dropped if it is dead.

    `variants` are pairs of an op and the variant (`Profile.cost`) that all its runs use, first and
    again: another algorithm rounds otherwise. An op that is absent runs as it does by default.
    `policy` is the spec text of the policy that made the plan. `trace_digest` names the trace, the
    only one the plan may be used for; `problem_digest` names the problem it was made for, whose
    measurements and budgets may have changed since. Both may be empty while a policy searches.
    """

    choices: tuple[tuple[Gap, Choice], ...]
    policy: str = ""
    problem_digest: str = ""
    trace_digest: str = ""
    variants: tuple[tuple[int, int], ...] = ()
    by_gap: dict[Gap, Choice] = field(init=False, repr=False, compare=False)
    """Derived: `choices` as a mapping."""
    by_op: dict[int, int] = field(init=False, repr=False, compare=False)
    """Derived: `variants` as a mapping."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_gap", dict(self.choices))
        object.__setattr__(self, "by_op", dict(self.variants))

    def choice(self, gap: Gap) -> Choice:
        """The choice for `gap`."""
        found = self.by_gap.get(gap)
        return default_choice(gap) if found is None else found

    @property
    def moves(self) -> tuple[tuple[Gap, Choice], ...]:
        """The choices that are not as by default."""
        return tuple(item for item in self.choices if item[1] != default_choice(item[0]))

    def variant(self, op: int) -> int:
        """The variant that all runs of `op` use."""
        return self.by_op.get(op, 0)


KEEP = Keep()
DROP = Recompute()


def default_choice(gap: Gap) -> Choice:
    """What happens in a gap of which a plan says nothing."""
    return DROP if gap.dead else KEEP


def make_plan(
    choices: dict[Gap, Choice],
    policy: str = "",
    problem_digest: str = "",
    trace_digest: str = "",
    variants: Mapping[int, int] | None = None,
) -> Plan:
    """A Plan of `choices` and `variants` (op -> variant), sorted, without what is as by default."""
    moved = (item for item in choices.items() if item[1] != default_choice(item[0]))
    return Plan(
        tuple(sorted(moved, key=lambda item: item[0])),
        policy,
        problem_digest,
        trace_digest,
        tuple(sorted((op, variant) for op, variant in (variants or {}).items() if variant)),
    )
