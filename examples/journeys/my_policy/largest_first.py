"""largest_first: a custom policy, as in docs/writing-a-policy.md."""

# ruff: noqa: INP001 - a standalone module

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore import InfeasibleError, Plan, Problem
from outcore.ir.plan import Gap
from outcore.policies.candidates import away, candidates
from outcore.policies.settle import settle


@dataclass(frozen=True, slots=True)
class LargestFirst:
    """Offload the largest activations, and only as many as needed."""

    name: ClassVar[str] = "largest-first"
    summary: ClassVar[str] = "offload the largest activations, as few as will do"

    min_bytes: int = 64 * 1024

    def plan(self, problem: Problem) -> Plan:
        """Offload as few as possible. Raises InfeasibleError if all of them are not enough."""
        buffers = problem.trace.buffers
        gaps = sorted(candidates(problem, self.min_bytes), key=lambda g: -buffers[g.buffer].nbytes)
        few, many = 0, len(gaps)
        while few < many:
            middle = (few + many) // 2
            try:
                self._offload(problem, gaps[:middle])
                many = middle
            except InfeasibleError:
                few = middle + 1
        return self._offload(problem, gaps[:few])

    def _offload(self, problem: Problem, gaps: Sequence[Gap]) -> Plan:
        return settle(problem, dict.fromkeys(gaps, away(problem)), self)
