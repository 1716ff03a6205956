"""jit: functions compiled by numba if it is installed, and plain Python functions if not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
"""Whether numba is installed."""


class Ints(Protocol):
    """A table of ints, indexed by (row, column)."""

    def __getitem__(self, cell: tuple[int, int], /) -> int: ...
    def __setitem__(self, cell: tuple[int, int], value: int, /) -> None: ...


class Floats(Protocol):
    """A table of floats, indexed by (row, column)."""

    def __getitem__(self, cell: tuple[int, int], /) -> float: ...
    def __setitem__(self, cell: tuple[int, int], value: float, /) -> None: ...


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`; the machine code is cached on disk if that is possible.

    The function is inlined into its callers: functions this small take less time than calling them.
    """
    if njit is None:
        return function
    return _made(function, forceinline=True)


def entry(types: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function that Python calls: not inlined, and other threads run meanwhile.

    `types` are those of its arguments, in numba's words. It is compiled when it is first called, or
    by `compile_entries`.
    """

    def made(function: Callable[P, R]) -> Callable[P, R]:
        if njit is None:
            return function
        found = _made(function, nogil=True)
        ENTRIES.append((found, f"({types},)"))
        return found

    return made


ENTRIES: list[tuple[Any, str]] = []
"""The functions that Python calls, each with the types of its arguments; empty without numba."""


def compile_entries() -> None:
    """Compile the functions that Python calls, of all modules that are loaded by now.

    That takes half a minute, but only if no machine code is cached yet.
    """
    for function, types in ENTRIES:
        function.compile(types)


def _made(function: Callable[P, R], **options: bool) -> Callable[P, R]:
    """Compile by numba, without a cache on disk if none can be written."""
    made: Any
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the source's folder nor the user's cache is writable
        made = njit(**options)(function)
    cache: Any = getattr(made, "_cache", None)  # there is no other hook, and not always this one
    if hasattr(cache, "save_overload"):
        cache.save_overload = _if_it_can(cache.save_overload)
    found: Callable[P, R] = made
    return found


def _if_it_can(save: Callable[..., object]) -> Callable[..., None]:
    """`save` that does without if the disk is full, or a quota is used up."""

    def saved(*args: object) -> None:
        with suppress(OSError):
            save(*args)

    return saved


class Cells(dict[tuple[int, int], Any]):
    """The table that plain Python reads fastest: a dict by (row, column), with default zero."""

    def __missing__(self, cell: tuple[int, int]) -> int:
        return 0


def native(table: NDArray[Any]) -> Any:
    """Return `table` in the form that the functions take: an array, or `Cells` without numba."""
    if COMPILED:
        return table
    rows, columns = np.nonzero(table)
    cells = zip(rows.tolist(), columns.tolist(), strict=True)
    return Cells(zip(cells, table[rows, columns].tolist(), strict=True))
