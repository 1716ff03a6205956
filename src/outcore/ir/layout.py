"""Layout: where in a stretch of device memory a program's large slots lie, and how they get there.

A stretch is a contiguous range of addresses. A GPU's allocator accepts no addresses: a request gets
the smallest free block that is large enough. So outcore holds all free memory of the stretch in
pieces, and frees exactly the place where the next request is to lie (decision 0037). A Layout lists
these moves per body position. All of them are computed in advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Hold:
    """Piece `piece` allocates the `nbytes` free bytes from `offset` on, so that they stay free."""

    piece: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """Piece `piece` frees its bytes, for a request that follows."""

    piece: int


Move: TypeAlias = Hold | Release


@dataclass(frozen=True, slots=True)
class Layout:
    """Places in a stretch of `nbytes`. At first, piece 0 holds all of it.

    `moves`: body position -> what is held and released directly before the requests of that
    position. At these positions all requests are served from the stretch, at others none.
    `pause`: what is released as the forward call ends, so that the caller can have it. `resume`:
    what is held as the backward call begins.
    `positions`: slot -> the body position at which it is requested. `offsets`: slot -> where it
    lies, in bytes from the start of the stretch. `guests`: slots that outlive the program; they are
    copied out of the stretch at once. `at_home`: positions whose op makes only what outlives the
    program, and makes it outside the stretch. `peak_bytes`: the most device memory in use, what the
    pieces hold included.
    """

    nbytes: int
    moves: Mapping[int, tuple[Move, ...]]
    positions: Mapping[int, int]
    offsets: Mapping[int, int]
    guests: frozenset[int]
    at_home: frozenset[int]
    peak_bytes: int
    pause: tuple[Release, ...] = ()
    resume: tuple[Hold, ...] = ()
