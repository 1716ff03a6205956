"""Layout: where in a stretch of device memory a program's large slots lie, and how they get there.

A GPU's allocator takes no addresses: a request gets the smallest free block that has the room. So
whatever is free of the stretch is held in pieces, and let go just where the next request is to lie
(decision 0037). A Layout is those moves, for each body position: all of it was decided before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Hold:
    """Piece `piece` takes the free bytes from `offset` on, `nbytes` of them, out of circulation."""

    piece: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """Piece `piece` gives its bytes back, for a request to come."""

    piece: int


Move: TypeAlias = Hold | Release


@dataclass(frozen=True, slots=True)
class Layout:
    """A stretch of `nbytes`, of which piece 0 holds everything at first.

    `moves`: body position -> what comes just before its requests, which all are for the stretch;
    others are not. `positions`: slot -> the one at which it is asked for; `offsets`: slot -> where
    it lies then, in bytes from the start. `guests`: slots that outlive the program, and are copied
    elsewhere at once; `at_home`: positions whose op makes nothing but what outlives the program,
    and makes it elsewhere. `peak_bytes`: the most of the device that is in use, what is held here
    included.
    """

    nbytes: int
    moves: Mapping[int, tuple[Move, ...]]
    positions: Mapping[int, int]
    offsets: Mapping[int, int]
    guests: frozenset[int]
    at_home: frozenset[int]
    peak_bytes: int
