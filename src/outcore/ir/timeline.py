"""Timeline: a Program in time, simulated or measured. Both are the same type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.program import Stream


class Cause(Enum):
    """Why the compute stream stood still."""

    FETCH = "fetch"
    """A run needed data whose copy back was not done."""
    RELEASE = "release"
    """Memory was needed whose copy out was not done."""
    PACE = "pace"
    """The plan asked to wait."""


@dataclass(frozen=True, slots=True)
class Span:
    """Instruction at body position `instruction` held its stream from start to stop (seconds)."""

    instruction: int
    stream: Stream
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The compute stream waited `seconds` before the instruction at `instruction`."""

    instruction: int
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in order of body position; `peak_bytes` per tier, everything counted."""

    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    peak_bytes: tuple[tuple[Tier, int], ...]
    source: Source

    @property
    def seconds(self) -> float:
        """From the first start to the last stop; 0 where there are no spans."""
        start = min((s.start_seconds for s in self.spans), default=0.0)
        return max((s.stop_seconds for s in self.spans), default=0.0) - start

    def peak(self, tier: Tier) -> int:
        """Peak bytes held in `tier`."""
        return next((nbytes for each, nbytes in self.peak_bytes if each is tier), 0)

    def stall_seconds(self, cause: Cause | None = None) -> float:
        """Time the compute stream stood still, for one cause or for all."""
        return sum(s.seconds for s in self.stalls if cause is None or s.cause is cause)

    def busy_seconds(self, stream: Stream) -> float:
        """Time `stream` was at work."""
        return sum(s.stop_seconds - s.start_seconds for s in self.spans if s.stream is stream)
