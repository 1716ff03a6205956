"""packing: place blocks with known lifetimes in a stretch that is as short as possible.

Each block in turn gets the lowest place that is free for its lifetime. The order of the blocks
decides the result. A local search changes the order, starting with the blocks that reach highest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MOST_STEPS, MOST_STEPS_IN_PYTHON = 100_000_000, 3_000_000
"""How many pairs of blocks that are live at once are visited, with numba and without: 1 to 2 s."""

FORWARD = 0.6
"""The fraction of changes that move a block at the top forward in the order; others swap two."""

WORSE = 0.01
"""The fraction of changes for the worse that are accepted."""


@dataclass(frozen=True, slots=True)
class Stay:
    """`nbytes` that are in use from position `first` until before `last`."""

    first: int
    last: int
    nbytes: int


def pack(stays: Sequence[Stay], most_bytes: int, seed: int = 0) -> tuple[int, ...] | None:
    """An offset for each of `stays`, so that none ends beyond `most_bytes`; None if none is found.

    Stays that are live at once do not overlap. It tries three orders (by size, by size and time, by
    time), then changes of the best. Each takes n * m steps for n stays, if each of them is live at
    once with m others.
    """
    if not stays:
        return ()
    if lowest_bytes(stays) > most_bytes:
        return None
    search = _Search(stays, random.Random(seed))
    return search.offsets(most_bytes)


def lowest_bytes(stays: Sequence[Stay]) -> int:
    """The most bytes in use at once: no packing needs less."""
    changes = [(s.first, s.nbytes) for s in stays] + [(s.last, -s.nbytes) for s in stays]
    return max(accumulate(nbytes for _, nbytes in sorted(changes)), default=0)


class _Search:
    def __init__(self, stays: Sequence[Stay], draws: random.Random) -> None:
        from outcore.allocators.places import COMPILED, put  # noqa: PLC0415 - loads numba

        self.put, self.draws = put, draws
        self.first = np.array([stay.first for stay in stays])
        self.last = np.array([stay.last for stay in stays])
        self.nbytes = np.array([stay.nbytes for stay in stays], dtype=np.int64)
        meets = (self.first[:, None] < self.last) & (self.first < self.last[:, None])
        np.fill_diagonal(meets, val=False)
        self.ends = np.cumsum(meets.sum(axis=1))
        self.met = np.nonzero(meets)[1]
        steps = MOST_STEPS if COMPILED else MOST_STEPS_IN_PYTHON
        self.tries = steps // (len(self.met) + len(stays))

    def offsets(self, most_bytes: int) -> tuple[int, ...] | None:
        time = self.last - self.first
        keys = (-self.nbytes, -self.nbytes.astype(float) * time, -time)
        orders = [np.argsort(key, kind="stable") for key in keys]
        found = [(*self._placed(order), order) for order in orders]
        height, at, order = min(found, key=lambda each: each[0])
        tries = 0
        best, lowest = at, height
        while lowest > most_bytes:
            if tries == self.tries:
                return None
            tries += 1
            changed = self._changed(order, at, height)
            new_height, new_at = self._placed(changed)
            if new_height <= height or self.draws.random() < WORSE:
                order, height, at = changed, new_height, new_at
                if height < lowest:
                    best, lowest = at, height
        return tuple(best.tolist())

    def _placed(self, order: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        at = np.zeros(len(order), dtype=np.int64)
        height = self.put(order, self.ends, self.met, self.nbytes, at)
        return height, at

    def _changed(
        self, order: NDArray[np.int64], at: NDArray[np.int64], height: int
    ) -> NDArray[np.int64]:
        top = self.draws.choice(np.flatnonzero(at + self.nbytes == height).tolist())
        place = int(np.flatnonzero(order == top)[0])
        if place and self.draws.random() < FORWARD:
            to = self.draws.randrange(place)
            return np.concatenate([order[:to], [top], order[to:place], order[place + 1 :]])
        changed = order.copy()
        one, other = self.draws.randrange(len(order)), self.draws.randrange(len(order))
        changed[one], changed[other] = order[other], order[one]
        return changed
