"""places: put each block at its lowest free place, in a given order; compiled if numba is there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outcore.jit import COMPILED, entry

__all__ = ["COMPILED", "put"]


@entry("i8[::1], i8[::1], i8[:], i8[::1], i8[::1]")
def put(
    order: NDArray[np.int64],
    ends: NDArray[np.int64],
    met: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    at: NDArray[np.int64],
) -> int:
    """Write the offset of each block to `at`; returns where the highest ends, in bytes.

    The blocks that are live at once with block `i` are `met[ends[i - 1]:ends[i]]`.
    """
    placed = np.zeros(len(order), dtype=np.bool_)
    low = np.empty(len(order), dtype=np.int64)
    high = np.empty(len(order), dtype=np.int64)
    height = 0
    for block in order:
        taken = 0
        for index in range(ends[block - 1] if block else 0, ends[block]):
            other = met[index]
            if placed[other]:
                place = taken
                while place and low[place - 1] > at[other]:
                    low[place], high[place] = low[place - 1], high[place - 1]
                    place -= 1
                low[place], high[place] = at[other], at[other] + nbytes[other]
                taken += 1
        offset = 0
        for index in range(taken):
            if low[index] - offset >= nbytes[block]:
                break
            offset = max(offset, high[index])
        at[block], placed[block] = offset, True
        height = max(height, offset + nbytes[block])
    return height
