"""Pass `place`: pack the slots of the outer tiers into few bytes, by their lifetimes.

First fit in order of allocation. What crosses from the forward to the backward call keeps its place
until the end of the step, so that a second backward call (`retain_graph`) finds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from outcore.ir.hardware import Tier
from outcore.ir.program import Alloc, Free, Slot
from outcore.lower.draft import Draft, crossing_slots


def place(draft: Draft) -> Draft:
    """The draft with an `offset` for every slot of an outer tier."""
    slots = list(draft.slots)
    crossing = crossing_slots(draft)
    rooms = {tier: _FreeList() for tier in Tier}
    for step in draft.steps:
        for action in (*step.before, *step.after):
            if not isinstance(action, Alloc | Free) or slots[action.slot].tier is Tier.DEVICE:
                continue
            slot = slots[action.slot]
            if isinstance(action, Alloc):
                offset = rooms[slot.tier].take(slot.nbytes)
                slots[slot.id] = replace(slot, offset=offset)
            elif slot.id not in crossing:
                rooms[slot.tier].give(slot.offset, slot.nbytes)
    return replace(draft, slots=slots)


def compacted(slots: Sequence[Slot], before: Sequence[Slot]) -> tuple[Slot, ...]:
    """`slots`, which were larger `before`, moved together in the outer tiers.

    Of two in a tier, the one that ended before the other began still does. So no two come to share
    memory.
    """
    moved = list(slots)
    for tier in set(Tier) - {Tier.DEVICE}:
        there = [slot for slot in before if slot.tier is tier and slot.nbytes]
        ends = sorted((slot.offset + slot.nbytes, slot.id) for slot in there)
        passed = start = 0
        for old in sorted(there, key=attrgetter("offset")):
            while ends[passed][0] <= old.offset:
                last = moved[ends[passed][1]]
                passed, start = passed + 1, max(start, last.offset + last.nbytes)
            moved[old.id] = replace(slots[old.id], offset=start)
    return tuple(moved)


class _FreeList:
    """Free ranges (start, stop), ascending, adjacent ones merged. The last one has no end."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, float]] = [(0, float("inf"))]

    def take(self, nbytes: int) -> int:
        index = next(i for i, (a, b) in enumerate(self.ranges) if b - a >= nbytes)
        start, stop = self.ranges[index]
        self.ranges[index : index + 1] = [(start + nbytes, stop)] if stop > start + nbytes else []
        return start

    def give(self, start: int, nbytes: int) -> None:
        if not nbytes:
            return
        stop: float = start + nbytes
        at = bisect_left(self.ranges, (start, stop))
        low, high = at, at
        if at and self.ranges[at - 1][1] == start:
            low, start = at - 1, self.ranges[at - 1][0]
        if at < len(self.ranges) and self.ranges[at][0] == stop:
            high, stop = at + 1, self.ranges[at][1]
        self.ranges[low:high] = [(start, stop)]
