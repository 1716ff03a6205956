"""recorded: where the time of a recorded step went, compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.ir.program import Program, Stream
from outcore.ir.timeline import Timeline
from outcore.report.planned import PlannedStep
from outcore.units import format_seconds


@dataclass(frozen=True, slots=True)
class Recorded:
    """The calls of a recorded step (`Backend.record_step`), in seconds: sums over all calls.

    Clocks around each op add a little to the ops.
    """

    seconds: float
    """From the first op of each call (forward or backward), or the wait for it, to the last op."""
    ops_seconds: float
    """The ops, reruns included."""
    planned_ops_seconds: float
    """The same by the plan."""
    wait_seconds: float
    """Time that compute waited for copies."""

    @property
    def between_seconds(self) -> float:
        """The rest: time between ops, in which no copy was awaited, but maybe the host."""
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
        seconds += step.often * sum(_calls_seconds(step.program, step.measured))
        ops += step.often * step.measured.busy_seconds(Stream.COMPUTE)
        planned += step.often * step.predicted.busy_seconds(Stream.COMPUTE)
        waits += step.often * step.measured.stall_seconds()
    return Recorded(seconds, ops, planned, waits) if ops else None


def _calls_seconds(program: Program, timeline: Timeline) -> Iterator[float]:
    """Seconds of the forward call, and of the backward call."""
    waits = {stall.instruction: stall.seconds for stall in timeline.stalls}
    ops = [span for span in timeline.spans if span.stream is Stream.COMPUTE]
    for backward in (False, True):
        call = [span for span in ops if (span.instruction >= program.boundary) is backward]
        if call:
            waited = waits.get(call[0].instruction, 0.0)
            yield waited + call[-1].stop_seconds - call[0].start_seconds
