"""The seam to numba: compiled where it is installed, the same functions as Python where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError:
    njit = None

P = ParamSpec("P")
R = TypeVar("R")

COMPILED = njit is not None


class Ints(Protocol):
    """A table of ints, by (row, column)."""

    def __getitem__(self, cell: tuple[int, int], /) -> int: ...
    def __setitem__(self, cell: tuple[int, int], value: int, /) -> None: ...


class Floats(Protocol):
    """A table of floats, by (row, column)."""

    def __getitem__(self, cell: tuple[int, int], /) -> float: ...
    def __setitem__(self, cell: tuple[int, int], value: float, /) -> None: ...


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as machine code, kept on disk between processes where that can be written to.

    All is inlined: functions this small take less time than calling them.
    """
    if njit is None:
        return function
    return _made(function, forceinline=True)


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """The same, not inlined: for what Python calls. Other threads go on beside it."""
    if njit is None:
        return function
    return _made(function, nogil=True)


def _made(function: Callable[P, R], **options: bool) -> Callable[P, R]:
    made: Callable[P, R]
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # no place for files: neither beside the source nor in the user's cache
        made = njit(**options)(function)
    return made


class Cells(dict[tuple[int, int], Any]):
    """A table as Python reads it fastest: by (row, column), and zero where nothing was written."""

    def __missing__(self, cell: tuple[int, int]) -> int:
        return 0


def native(table: NDArray[Any]) -> Any:
    """`table` as the functions take it."""
    if COMPILED:
        return table
    rows, columns = np.nonzero(table)
    cells = zip(rows.tolist(), columns.tolist(), strict=True)
    return Cells(zip(cells, table[rows, columns].tolist(), strict=True))
