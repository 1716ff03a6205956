"""layout: find a place for each large slot of a program, and how it gets there on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.allocators.best_fit import MIB
from outcore.allocators.packing import lowest_bytes, pack
from outcore.allocators.placed_range import MisfitError, PlacedRange
from outcore.allocators.requests import MOST_GUEST_BYTES, Request, Requests
from outcore.ir.layout import Hold, Layout, Move, Release
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.totals import resident_bytes

LIBRARIES_BYTES = 64 * MIB
"""What libraries keep for a separate stream once they were used on it: cuBLAS keeps 32 MiB for each
of the two threads that run a step, on an H100."""

BESIDE_BYTES = LIBRARIES_BYTES + 64 * MIB
"""Room for that, for small blocks, for pages in use in part, and for what holds the ends of the
stretch."""

ATTEMPTS = 4
"""Packings that are tried. One may fail: of two equally large blocks that one op requests, one gets
the place of the other and stays there for longer."""


@dataclass(frozen=True, slots=True)
class Space:
    """Device bytes that may be in use during a step, and those that are needed after it."""

    budget_bytes: int
    after_bytes: int = 0

    def left_bytes(self, requests: Requests, outside_bytes: int) -> int:
        """Bytes left for a stretch, which is kept between steps, with `outside_bytes` in a step."""
        after = resident_bytes(requests.problem) + self.after_bytes + BESIDE_BYTES
        return self.budget_bytes - max(outside_bytes, after)


def lay_out(problem: Problem, program: Program, space: Space) -> Layout | None:
    """Places within `space` for everything that the ops of `program` request, except small blocks.

    None if no places are found, or if a result is one of these:

    - It is copied back (it would be moved before the copy is done).
    - It does not cover its whole storage, so it cannot be moved.
    - It is too large, and is made together with something that is not a result.
    """
    requests = Requests(problem, program)
    guests = requests.guests.values()
    if any(block.nbytes > MOST_GUEST_BYTES or requests.fetches(block) for block in guests):
        return None
    if not requests.guests.keys() <= requests.whole():
        return None
    outside = _outside_bytes(requests)
    stays, left = [block.stay for block in requests.blocks], space.left_bytes(requests, outside)
    for seed in range(ATTEMPTS if stays else 0):
        offsets = pack(stays, left, seed)
        if offsets is None:
            return None
        try:
            return _laid(requests, offsets, outside)
        except MisfitError:
            continue
    return None


def lacking_bytes(problem: Problem, program: Program, space: Space) -> int:
    """Bytes that every layout lacks within `space`; zero or less if there may be a layout."""
    requests = Requests(problem, program)
    lowest = lowest_bytes([block.stay for block in requests.blocks])
    return lowest - space.left_bytes(requests, _outside_bytes(requests))


def _outside_bytes(requests: Requests) -> int:
    """The most bytes in use outside the stretch, with room for fragmentation there.

    That may be as much as the largest result that is made there, among requests of other code.
    """
    slots = requests.program.slots
    at_home = (slot for position in requests.at_home for slot in requests.writes(position))
    largest = max((slots[slot].nbytes for slot in at_home), default=0)
    return requests.outside_bytes() + largest + BESIDE_BYTES


def _laid(requests: Requests, offsets: Sequence[int], outside_bytes: int) -> Layout:
    """The moves for blocks at `offsets`. Raises MisfitError if no moves put them there."""
    at = {id(block): offset for block, offset in zip(requests.blocks, offsets, strict=True)}
    nbytes = max(at[id(block)] + block.stay.nbytes for block in requests.blocks)
    stretch = PlacedRange(nbytes)
    moves: dict[int, tuple[Move, ...]] = {}
    places: dict[int, int] = {}
    between: tuple[tuple[Release, ...], tuple[Hold, ...]] = (), ()
    for position in range(len(requests.program.body)):
        if position == requests.program.boundary:
            between = stretch.pause()
        blocks = requests.at.get(position, ())
        if blocks:
            holes = _in_order(blocks, at)
            moves[position] = tuple(stretch.open(holes))
            for block, (offset, size) in zip(blocks, holes, strict=True):
                at[id(block)] = offset
                if block.slot is not None:
                    places[block.slot] = offset
                if block.last > position + 1:
                    stretch.use(offset, size)
        freed = requests.frees.get(position)
        if freed is not None and freed.last > freed.first + 1:
            stretch.free(at[id(freed)])
    return Layout(
        nbytes=nbytes,
        moves=moves,
        positions={b.slot: b.first for b in requests.blocks if b.slot is not None},
        offsets=places,
        guests=frozenset(requests.guests),
        at_home=frozenset(requests.at_home),
        peak_bytes=outside_bytes + nbytes,
        pause=between[0],
        resume=between[1],
    )


def _in_order(blocks: Sequence[Request], at: dict[int, int]) -> list[tuple[int, int]]:
    """Places and bytes of the blocks that one op requests, in the order of its requests.

    Among equally large blocks, the first gets the lowest place.
    """
    by_size: dict[int, list[int]] = {}
    for block in blocks:
        by_size.setdefault(block.nbytes, []).append(at[id(block)])
    lowest = {size: iter(sorted(offsets)) for size, offsets in by_size.items()}
    return [(next(lowest[block.nbytes]), block.nbytes) for block in blocks]
