"""Benchmark: the type of all benchmarks, and the limit on the time that one may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchmarks.kit.rows import Row

S = TypeVar("S")
"""The scale, which says how much is run: each kit has its own dataclass for it."""


class Patience:
    """The time that a benchmark may take. What has not begun when it is over is left out.

    `seconds` is this time. After `last_seconds`, which is usually a limit for all benchmarks
    together, even what has begun must have ended. `known` maps the keys of rows that are there
    already to the rows: they can be left out, too.
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
        """Whether anything was left out."""

    def over(self) -> bool:
        """Whether to begin nothing more. Ask only before something that would otherwise begin."""
        over = self._end is not None and time.monotonic() > self._end
        self.cut |= over
        return over

    def left_seconds(self) -> float:
        """How long what has begun may continue; infinite if there is no limit."""
        return math.inf if self._last is None else max(0.0, self._last - time.monotonic())


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[S]):
    """A question, and the function that answers it row by row."""

    name: str
    summary: str
    run: Callable[[S, Patience], Iterator[Row]]
    weight: float = 1.0
    """Its share of the time if time is limited, relative to the weights of the others."""
