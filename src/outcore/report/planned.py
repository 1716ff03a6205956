"""What the pages of a report are drawn from: graphs as planned, and what other budgets take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One graph of a training step: its plan, and the plan in time.

    Both are of one of its `calls`, which is how often a step that runs it does. It runs in a
    `share` of the steps: less than all where graphs take turns.
    `in_core` is the Timeline with everything kept. `measured` is that of one step that ran, where
    one was recorded: it has spans for runs and for the copies that the driver heard of.
    """

    problem: Problem
    plan: Plan
    program: Program
    predicted: Timeline
    in_core: Timeline
    planning_seconds: float | None = None
    measured: Timeline | None = None
    calls: int = 1
    share: float = 1.0

    @property
    def often(self) -> float:
        """How many of its calls a step has, on average."""
        return self.calls * self.share

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The predicted one, and the measured one where there is one."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)

    @property
    def peak_bytes(self) -> int:
        """What the device is predicted to hold at most."""
        return self.predicted.peak(Tier.DEVICE)


class Swept(Protocol):
    """What budgets take: `outcore.sweep.Sweep`, as far as a page shows it."""

    @property
    def in_core_seconds(self) -> float:
        """The step with everything kept."""
        ...

    @property
    def in_core_peak_bytes(self) -> int:
        """What that holds at most."""
        ...

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that some plan meets."""
        ...

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes, in the order they were planned for."""
        ...

    @property
    def policies(self) -> tuple[str, ...]:
        """Specs, in the order they were given."""
        ...

    def slowdowns(self, policy: str) -> list[float | None]:
        """For each budget that of the policy's plan; None where it has none."""
        ...

    def bounds(self) -> dict[int, float]:
        """Budget -> seconds that no plan beats, where that is known."""
        ...
