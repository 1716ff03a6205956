"""swaps: decide which uses of a buffer read a copy that came back, and when it is issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.ir.hardware import Tier
from outcore.ir.liveness import Liveness, gaps, liveness
from outcore.ir.plan import Choice, Gap, Offload
from outcore.ir.trace import Trace
from outcore.policies.lms.levels import Ints, Levels, levels

Bools = NDArray[np.bool_]

ON_THE_SPOT = -1
"""In place of a node: the copy back is issued immediately before its reader."""

MAKER = -1
"""In place of an edge: the op before a gap is the one that makes the buffer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The four numbers that decide all swaps. Distances are in levels."""

    threshold: int
    """A use further than this from the op that makes the buffer reads a copy that came back."""
    ahead: int
    """How far before its reader a copy back is issued; 0: immediately before it."""
    groupby: int
    """These far uses share a copy while each is at most this far after the one before; 0: none
    do."""
    sync: int
    """1 or 3: wait for each copy out; 2 or 3: wait for each copy back."""

    @property
    def waits_out(self) -> bool:
        """Whether compute waits for each copy out."""
        return self.sync in {1, 3}

    @property
    def waits_in(self) -> bool:
        """Whether compute waits for each copy back."""
        return self.sync in {2, 3}


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """What a setting does, per edge."""

    far: Bools
    """Whether the edge reads a copy that came back."""
    group: Ints
    """The number of that copy, if the edge is far."""
    opens: Bools
    """Whether the edge is the first that reads that copy."""
    trigger: Ints
    """The node after which the copy is issued if the edge opens a group, or ON_THE_SPOT."""


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Edges from the op that makes a buffer to each op that reads it, buffer by buffer."""

    levels: Levels
    """The levels of the trace."""
    buffers: tuple[int, ...]
    """The buffers that may be swapped."""
    source: Ints
    """Per buffer of `buffers`: the node that makes it."""
    owner: Ints
    """Per edge: the index of its buffer in `buffers`."""
    target: Ints
    """Per edge: the node that reads; in order of levels for each buffer, ties in order of the
    trace."""
    idle: tuple[Gap, ...]
    """Every gap of the buffers."""
    starts: Ints
    """Per gap: the edge to the op before it, or MAKER."""
    ends: Ints
    """Per gap: the edge to the op after it."""

    def swaps(self, setting: Setting) -> Swaps:
        """The swaps under `setting`. Linear in edges."""
        level = self.levels.level
        at, start = level[self.target], level[self.source[self.owner]]
        far = at - start > setting.threshold
        follows = np.zeros_like(far)
        follows[1:] = far[:-1] & (self.owner[1:] == self.owner[:-1])
        if setting.groupby:
            follows[1:] &= at[1:] - at[:-1] <= setting.groupby
        else:
            follows[:] = False
        opens = far & ~follows
        trigger = np.full_like(self.target, ON_THE_SPOT)
        if setting.ahead and not setting.waits_in:
            early = far & (at - start - 2 >= setting.ahead)
            trigger[early] = self.levels.ancestors(self.target[early], setting.ahead + 1)
        return Swaps(far, np.cumsum(opens) - 1, opens, trigger)


def edges(trace: Trace, min_bytes: int) -> Edges:
    """The edges of all buffers of at least `min_bytes` that may be swapped. O(n log n) in uses.

    A buffer may be swapped if an op makes it, another op reads it, and nothing holds it to the end.
    """
    live, order = liveness(trace), levels(trace)
    wanted = [b for b in range(len(trace.buffers)) if _swappable(trace, live, b, min_bytes)]
    source: list[int] = []
    owner: list[int] = []
    target: list[int] = []
    number: dict[tuple[int, int], int] = {}
    for index, buffer in enumerate(wanted):
        producer, *readers = live.uses[buffer]
        source.append(order.node(producer))
        for op in sorted(readers, key=lambda op: (order.level[order.node(op)], op)):
            number[buffer, op] = len(target)
            owner.append(index)
            target.append(order.node(op))
    chosen = set(wanted)
    idle = tuple(gap for gap in gaps(trace) if gap.buffer in chosen)
    return Edges(
        levels=order,
        buffers=tuple(wanted),
        source=_ints(source),
        owner=_ints(owner),
        target=_ints(target),
        idle=idle,
        starts=_ints([number.get((gap.buffer, gap.after), MAKER) for gap in idle]),
        ends=_ints([number[gap.buffer, gap.before] for gap in idle]),
    )


def _swappable(trace: Trace, live: Liveness, buffer: int, min_bytes: int) -> bool:
    """Whether the buffer may be swapped: it is large enough, an op makes it, and it is not held."""
    if live.held[buffer] or live.producer[buffer] is None or len(live.uses[buffer]) == 1:
        return False
    return trace.buffers[buffer].nbytes >= min_bytes


def _ints(items: Sequence[int]) -> Ints:
    return np.array(items, dtype=np.int64)


def choices(edges: Edges, setting: Setting, tier: Tier) -> dict[Gap, Choice]:
    """The gaps that `setting` swaps, as offloads to `tier`. Linear in edges.

    The order of the trace is not the order of levels, so near uses may follow far ones. A buffer
    leaves after its last near use.
    """
    swaps, order = edges.swaps(setting), edges.levels
    near = ~swaps.far
    stays = edges.source.copy()
    np.maximum.at(stays, edges.owner[near], edges.target[near])
    starts, ends = edges.starts, edges.ends
    owner = edges.owner[ends]
    after = np.where(starts == MAKER, edges.source[owner], edges.target[starts])
    shared = (starts != MAKER) & swaps.far[starts] & (swaps.group[starts] == swaps.group[ends])
    leaves = (after >= stays[owner]) & ~shared
    made = starts == MAKER
    return {
        edges.idle[i]: _offload(
            edges.idle[i], order, int(swaps.trigger[ends[i]]), setting, tier, made=bool(made[i])
        )
        for i in np.flatnonzero(leaves)
    }


def _offload(
    gap: Gap, order: Levels, trigger: int, setting: Setting, tier: Tier, *, made: bool
) -> Offload:
    """The offload for `gap`; `made`: the op before the gap makes the buffer."""
    issue = gap.before if trigger == ON_THE_SPOT else order.op_after(trigger)
    waits = setting.waits_out
    return Offload(
        tier,
        depart=None if made or waits else gap.after,
        release=gap.after + 1 if waits else None,
        prefetch=max(gap.after + 1, issue),
    )
