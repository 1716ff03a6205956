"""Timeline: when each instruction of a Program ran, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.program import Stream


class Cause(Enum):
    """Why compute waited."""

    FETCH = "fetch"
    """An op needed data whose copy back was not done."""
    RELEASE = "release"
    """Memory was needed whose copy out was not done."""
    PACE = "pace"
    """The plan wants an earlier instruction to be done first (`Instruction.pace`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """The instruction at body position `instruction` occupied its stream from start to stop."""

    instruction: int
    stream: Stream
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute waited `seconds` before the instruction at body position `instruction`."""

    instruction: int
    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in order of body position; `peak_bytes` per tier, with everything counted."""

    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    peak_bytes: tuple[tuple[Tier, int], ...]
    source: Source

    @property
    def seconds(self) -> float:
        """From the first start to the last stop; 0 if there are no spans."""
        start = min((s.start_seconds for s in self.spans), default=0.0)
        return max((s.stop_seconds for s in self.spans), default=0.0) - start

    def peak(self, tier: Tier) -> int:
        """Peak bytes held in `tier`."""
        return next((nbytes for each, nbytes in self.peak_bytes if each is tier), 0)

    def stall_seconds(self, cause: Cause | None = None) -> float:
        """The time that compute waited, for one cause or for all."""
        return sum(s.seconds for s in self.stalls if cause is None or s.cause is cause)

    def busy_seconds(self, stream: Stream) -> float:
        """The time that `stream` was busy."""
        return sum(s.stop_seconds - s.start_seconds for s in self.spans if s.stream is stream)
