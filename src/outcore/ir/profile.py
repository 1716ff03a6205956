"""Profile: what each op of a trace costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    """Where a figure comes from."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Cost:
    """One run of an op: seconds alone on the device, and workspace bytes.

    The workspace is the peak inside the op less what it leaves behind (its outputs).
    """

    seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Per op, indexed by op id: seconds alone on the device, and workspace bytes (as in `Cost`).

    These are the costs of the op as it runs by default. `alternatives` are pairs of an op and the
    costs of its other algorithms, by ascending op: fast ones with a workspace beside slow ones
    without. A real device offers none (docs/decisions/0010).
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    source: Source
    alternatives: tuple[tuple[int, tuple[Cost, ...]], ...] = ()
    costs: tuple[tuple[Cost, ...], ...] = field(init=False, repr=False, compare=False)
    """Derived: per op its variants, the default first."""

    def __post_init__(self) -> None:
        others = dict(self.alternatives)
        figures = zip(self.seconds, self.workspace_bytes, strict=False)  # left to `verify_profile`
        costs = ((Cost(*pair), *others.get(op, ())) for op, pair in enumerate(figures))
        object.__setattr__(self, "costs", tuple(costs))

    @classmethod
    def unknown(cls, ops: int) -> Profile:
        """That of so many ops of which nothing is known: no time, no workspace."""
        return cls((0.0,) * ops, (0,) * ops, Source.ESTIMATED)

    def cost(self, op: int, variant: int = 0) -> Cost:
        """The cost of `op` as it runs by default, or by its `variant`-th alternative from 1."""
        return self.costs[op][variant]
