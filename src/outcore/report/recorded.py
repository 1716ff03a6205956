"""recorded: where the time of a recorded step went, compared with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.program import Stream
from outcore.report.planned import PlannedStep
from outcore.units import format_seconds


@dataclass(frozen=True, slots=True)
class Recorded:
    """The calls of one recorded step (`Backend.record_step`), in seconds; sums over all graphs.

    What is not in `ops_seconds` or `wait_seconds` lies between ops: the loss, and times when the
    device waited for the host. Clocks around each op add a little to the ops.
    """

    seconds: float
    """From the first op to the last one."""
    ops_seconds: float
    """The ops, reruns included."""
    planned_ops_seconds: float
    """The same by the plan."""
    wait_seconds: float
    """Time that compute waited for copies."""

    @property
    def between_seconds(self) -> float:
        """The rest: time between ops in which no copy was awaited."""
        return max(0.0, self.seconds - self.ops_seconds - self.wait_seconds)

    @property
    def ops_ratio(self) -> float:
        """Time of the ops, relative to their planned time; 1 if that is 0."""
        planned = self.planned_ops_seconds
        return self.ops_seconds / planned if planned else 1.0

    def __str__(self) -> str:
        """For people: the parts of the time."""
        ops = f"ops {format_seconds(self.ops_seconds)} ({self.ops_ratio:.1%} of planned)"
        waits = f"waits for copies {format_seconds(self.wait_seconds)}"
        between = f"between ops {format_seconds(self.between_seconds)}"
        return f"{format_seconds(self.seconds)}: {ops}, {waits}, {between}"


def recorded(steps: Sequence[PlannedStep]) -> Recorded | None:
    """The figures of a recorded step; None if a call in it was not recorded, or there is no op."""
    seconds = ops = planned = waits = 0.0
    for step in steps:
        if step.measured is None:
            return None
        seconds += step.often * step.measured.seconds
        ops += step.often * step.measured.busy_seconds(Stream.COMPUTE)
        planned += step.often * step.predicted.busy_seconds(Stream.COMPUTE)
        waits += step.often * step.measured.stall_seconds()
    return Recorded(seconds, ops, planned, waits) if ops else None
