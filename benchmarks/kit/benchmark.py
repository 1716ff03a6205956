"""Benchmark: what it is to be one, and how long it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchmarks.kit.rows import Row

S = TypeVar("S")
"""How much is run: a dataclass of each kit's own."""


class Patience:
    """Time that a benchmark may take: what has not begun when it is over is left out.

    `last_seconds` is when even what has begun must have ended; as a rule, that is for all of them.
    `known`: rows that are there already, by their keys, and can be left out, too.
    """

    def __init__(
        self,
        seconds: float | None = None,
        last_seconds: float | None = None,
        known: Mapping[Hashable, Mapping[str, Any]] | None = None,
    ) -> None:
        now = time.monotonic()
        self.known = known or {}
        self._end = None if seconds is None else now + seconds
        self._last = None if last_seconds is None else now + last_seconds
        self.cut = False
        """Whether something was left out."""

    def over(self) -> bool:
        """Whether to begin nothing more. Asked only before something that would else begin."""
        over = self._end is not None and time.monotonic() > self._end
        self.cut |= over
        return over

    def left_seconds(self) -> float:
        """How long what has begun may go on; infinite where nobody said."""
        return math.inf if self._last is None else max(0.0, self._last - time.monotonic())


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[S]):
    """A question, and the function that answers it row by row."""

    name: str
    summary: str
    run: Callable[[S, Patience], Iterator[Row]]
    weight: float = 1.0
    """Its part of the time, where time is limited, beside those of the others."""
