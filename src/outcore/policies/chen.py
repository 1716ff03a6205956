"""chen-sqrt: keep checkpoints along the forward pass, and recompute everything between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.plan import Gap, Plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.policies.candidates import candidates
from outcore.policies.checkpoints import between, between_every_root, crossing_points
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle
from outcore.simulate import simulate

STEPS = 24
"""How many segment sizes `greedy` tries, each smaller than the one before by the square root of
two."""


@dataclass(frozen=True, slots=True)
class ChenSqrt:
    """Keep every k-th articulation point of the forward pass, k the root of their number.

    The rest is recomputed, one segment at a time, each once. In a chain of n layers this needs
    O(sqrt n) memory and one more forward pass. With `greedy`, a point is kept whenever more than b
    bytes were made since the last one. Several b are tried, each smaller by the square root of two,
    and the fastest plan that fits is used.
    """

    name: ClassVar[str] = "chen-sqrt"
    summary: ClassVar[str] = "keep every sqrt(n)-th articulation point, recompute the rest"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""
    greedy: bool = False
    """Choose checkpoints by bytes, not by count."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the checkpoints.

        Raises InfeasibleError if it does not fit; with `greedy`, if none of the tried plans fits.
        """
        gaps = candidates(problem, self.min_bytes)
        if self.greedy:
            return self._fastest(problem, gaps)
        return settle(problem, between_every_root(problem, gaps), self)

    def _fastest(self, problem: Problem, gaps: Sequence[Gap]) -> Plan:
        """The fastest of the greedy plans that fit.

        Raises InfeasibleError, with the smallest budget that one of them meets, if none fits.
        """
        found: list[tuple[float, Plan]] = []
        leanest: InfeasibleError | None = None
        points = crossing_points(problem, gaps)
        for checkpoints in dict.fromkeys(_greedily(problem, points)):
            try:
                plan = settle(problem, between(problem, gaps, checkpoints), self)
            except InfeasibleError as error:
                if leanest is None or error.floor_bytes < leanest.floor_bytes:
                    leanest = error
                continue
            found.append((simulate(problem, lower(problem, plan, fast=True)).seconds, plan))
        if found:
            return min(found, key=lambda each: each[0])[1]
        assert leanest is not None  # noqa: S101 - at least one plan was tried
        try:
            raise leanest
        finally:
            del leanest  # its traceback refers to this frame: a cycle that keeps callers' data


def _greedily(problem: Problem, points: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Checkpoints among `points` for each segment size, beginning with one single segment."""
    trace, allowed = problem.trace, set(points)
    made = [b for op in range(trace.boundary) for b in trace.writes[op]]
    most = sum(trace.buffers[b].nbytes for b in made)
    for step in range(STEPS):
        limit = most / sqrt(2) ** step
        since, chosen = 0, []
        for buffer in made:
            since += trace.buffers[buffer].nbytes
            if buffer in allowed and since > limit:
                chosen.append(buffer)
                since = 0
        yield tuple(chosen)
