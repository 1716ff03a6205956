"""Profile: the time and workspace of each op of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    """How a figure was obtained."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run of an op: seconds alone on the device, and workspace in bytes.

    The workspace is the peak inside the op, less what it leaves behind (its outputs).
    """

    seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Per op, indexed by op id: seconds alone on the device, and workspace bytes (as in `Cost`).

    These are the costs of each op's default algorithm. `alternatives` are pairs of an op and the
    costs of its other algorithms, sorted by op: faster ones that need a workspace, slower ones
    that need none. A real device offers no alternatives (docs/decisions/0010).
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    source: Source
    alternatives: tuple[tuple[int, tuple[Cost, ...]], ...] = ()
    costs: tuple[tuple[Cost, ...], ...] = field(init=False, repr=False, compare=False)
    """Derived: per op, the costs of its variants, the default first."""

    def __post_init__(self) -> None:
        others = dict(self.alternatives)
        figures = zip(self.seconds, self.workspace_bytes, strict=False)  # `verify_profile` checks
        costs = ((Cost(*pair), *others.get(op, ())) for op, pair in enumerate(figures))
        object.__setattr__(self, "costs", tuple(costs))

    @classmethod
    def unknown(cls, ops: int) -> Profile:
        """A Profile of `ops` ops about which nothing is known: no time, no workspace."""
        return cls((0.0,) * ops, (0,) * ops, Source.ESTIMATED)

    def cost(self, op: int, variant: int = 0) -> Cost:
        """The cost of `op`: variant 0 is its default, variant n its n-th alternative."""
        return self.costs[op][variant]
