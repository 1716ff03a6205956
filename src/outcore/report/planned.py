"""PlannedStep, Swept: the data behind a report's page: planned graphs, and a sweep over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One graph of a training step with its plan and its timelines.

    Plan and timelines are those of one call to the graph.
    """

    problem: Problem
    plan: Plan
    program: Program
    predicted: Timeline
    """The simulated timeline of `program`."""
    in_core: Timeline
    """The simulated timeline with everything kept in device memory."""
    planning_seconds: float | None = None
    """How long planning took; None if it was not timed."""
    measured: Timeline | None = None
    """Timeline of a recorded step: runs, and the copies that the driver timed. None without one."""
    calls: int = 1
    """How many times a step that runs this graph calls it."""
    share: float = 1.0
    """The fraction of the steps that run this graph: below 1 if graphs take turns."""

    @property
    def often(self) -> float:
        """How many calls to this graph a step has on average."""
        return self.calls * self.share

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The predicted timeline, and then the measured one if there is one."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak memory of the device."""
        return self.predicted.peak(Tier.DEVICE)


GRAPHS = 24
"""The number of graphs that are drawn: those that take longest."""


def longest(steps: Sequence[PlannedStep]) -> list[int]:
    """The indices of the graphs that are drawn, in the order of the step."""
    order = sorted(range(len(steps)), key=lambda i: -steps[i].often * steps[i].predicted.seconds)
    return sorted(order[:GRAPHS])


class Swept(Protocol):
    """A sweep over budgets, as far as a page shows it: the interface of `outcore.sweep.Sweep`."""

    @property
    def in_core_seconds(self) -> float:
        """Time of a step with everything kept."""
        ...

    @property
    def in_core_peak_bytes(self) -> int:
        """Peak memory with everything kept."""
        ...

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that some plan meets."""
        ...

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes, in the order of planning."""
        ...

    @property
    def policies(self) -> tuple[str, ...]:
        """Policy specs, in the order in which they were given."""
        ...

    def slowdowns(self, policy: str) -> list[float | None]:
        """The slowdown of the policy's plan for each budget; None where it has no plan."""
        ...

    def bounds(self) -> dict[int, float]:
        """Map each budget to the seconds that no plan beats, where they are known."""
        ...
