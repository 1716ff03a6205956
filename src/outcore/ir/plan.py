"""Plan: for each gap between two uses of a buffer, whether to keep, offload or recompute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from outcore.ir.hardware import Tier


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """The idle stretch of `buffer` between its use by op `after` and its use by op `before`.

    `dead`: no op of the trace uses the buffer after op `after`. Until op `before`, recomputations
    of other buffers may still read it. It can be worth its memory, or its copies, if what is
    recomputed from it is larger or slow to compute.
    """

    buffer: int
    after: int
    before: int
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """The buffer stays on the device."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy the buffer to `tier`, free its device memory, and copy it back later.

    There are four optional hints. Each is an op id:

    - `depart`: the copy out is issued before this op runs, and the buffer keeps its device memory
      until then. None: right after the use. The op of that use itself: while that op runs.
    - `release`: the device memory is free again before this op runs; compute waits for the copy
      if necessary.
    - `prefetch`: the copy back is issued before this op.
    - `arrive`: compute waits for the copy back before this op, although only a later op needs it.

    Lowering decides if `release` or `prefetch` is None, or if memory does not allow a hint
    (`lower/release.py`, `prefetch.py`).
    """

    tier: Tier
    depart: int | None = None
    release: int | None = None
    prefetch: int | None = None
    arrive: int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop the buffer, and run the op that makes it again when it is needed. In a dead gap: drop.

    `stay` applies if the buffer is recomputed inside the gap as an input of another
    recomputation. True: it then stays for its next use (speed-centric, SuperNeurons section 3.4).
    False: it is freed after its last reader inside that recomputation, and recomputed again later
    (memory-centric).
    """

    stay: bool = False


Choice: TypeAlias = Keep | Offload | Recompute


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice per gap, sorted by gap. A gap that is not listed is kept, or dropped if dead.

    `variants` are pairs (op, variant, see `Profile.cost`). All runs of an op use its variant, also
    reruns, because another algorithm rounds differently. An op that is not listed runs with its
    default algorithm. `policy` is the spec text of the policy that made the plan. `trace_digest`
    names the trace: a plan is valid for that trace only. `problem_digest` names the problem that
    the plan was made for; its measurements and budgets may have changed since. Both digests may
    be empty while a policy searches.
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
        """The choices that differ from the default."""
        return tuple(item for item in self.choices if item[1] != default_choice(item[0]))

    def variant(self, op: int) -> int:
        """The variant that all runs of `op` use."""
        return self.by_op.get(op, 0)


KEEP = Keep()
DROP = Recompute()


def default_choice(gap: Gap) -> Choice:
    """What happens in a gap that a plan does not list."""
    return DROP if gap.dead else KEEP


KEEP_ALL = Plan((), "keep-all")
"""The plan that keeps everything on the device, for any trace."""


def make_plan(
    choices: dict[Gap, Choice],
    policy: str = "",
    problem_digest: str = "",
    trace_digest: str = "",
    variants: Mapping[int, int] | None = None,
) -> Plan:
    """A Plan of `choices` and `variants` (op -> variant), sorted, without the default ones."""
    moved = (item for item in choices.items() if item[1] != default_choice(item[0]))
    return Plan(
        tuple(sorted(moved, key=lambda item: item[0])),
        policy,
        problem_digest,
        trace_digest,
        tuple(sorted((op, variant) for op, variant in (variants or {}).items() if variant)),
    )
