"""recompute-all: drop what crosses the boundary and recompute it; offload what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.errors import PolicyError
from outcore.ir.plan import Choice, Gap, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, candidates, recomputable
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.reruns import limited
from outcore.policies.settle import settle


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
    """The most ops that one recomputation may run; 0: any number (as far as `limited` allows)."""
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
        cheap = [gap for gap in gaps if gap in again]
        if self.max_ops or not self.stay:
            cheap = limited(problem.trace, cheap, self.max_ops)
        choices |= dict.fromkeys(cheap, Recompute(self.stay))
        return settle(problem, choices, self)
