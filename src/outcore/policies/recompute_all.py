"""recompute-all: drop what crosses the boundary and recompute it; offload what cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import PolicyError
from outcore.ir.liveness import liveness
from outcore.ir.plan import Choice, Gap, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, candidates, ops_again, recomputable
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle

MOST_AGAIN = 1_000_000
"""About how many ops run again in all if `max_ops` sets no limit. In networks of thousands of
layers their number would be the square of the layers, a program that no memory holds."""


@dataclass(frozen=True, slots=True)
class RecomputeAll:
    """Recompute every candidate that can be made again, offload the others.

    Each recomputation drops what it passes through. With everything recomputed, a chain starts at
    what the caller holds, so n candidates in a row run n * n / 2 ops again (memory-centric). Two
    options trade memory and copies for time:

    - `max_ops`: a candidate that needs more ops is offloaded, and is a start for those after it.
    - `stay`: what a recomputation passes through stays for its own next use, so every op runs again
      about once (speed-centric). Without `max_ops` nearly everything is then live again at once.
    """

    name: ClassVar[str] = "recompute-all"
    summary: ClassVar[str] = "recompute all that can be made again, offload the rest"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""
    max_ops: int = 0
    """The most ops that one recomputation may run; 0: any number, as far as `MOST_AGAIN` allows."""
    stay: bool = False
    """Whether what a recomputation passes through stays for its own next use."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        if self.max_ops < 0:
            reason = f"max_ops={self.max_ops}: it is a number of ops, or 0 for no limit"
            raise PolicyError(policy=self.name, reason=reason)

    def plan(self, problem: Problem) -> Plan:
        """Recompute and offload. Raises InfeasibleError if the working sets do not fit."""
        gaps = candidates(problem, self.min_bytes)
        again = recomputable(problem, gaps)
        choices: dict[Gap, Choice] = dict.fromkeys(gaps, away(problem))
        cheap = self._cheap(problem, (gap for gap in gaps if gap in again))
        choices |= dict.fromkeys(cheap, Recompute(self.stay))
        return settle(problem, choices, self)

    def _cheap(self, problem: Problem, gaps: Iterable[Gap]) -> list[Gap]:
        """Those of `gaps`, in forward order, that need at most `max_ops` ops to recompute."""
        gaps, trace = list(gaps), problem.trace
        most = self.max_ops
        if not most and not self.stay and len(gaps) * trace.boundary > 2 * MOST_AGAIN:
            most = 2 * MOST_AGAIN // len(gaps)
        if not most:
            return gaps
        live = liveness(trace)
        dropped: dict[int, int] = {}
        cheap = []
        for gap in gaps:
            if len(ops_again(trace, live, gap, dropped)) <= most:
                cheap.append(gap)
                dropped[gap.buffer] = gap.before
        return cheap
