"""tracks: turn the runs and copies of a Timeline into slices, on one track per part that works."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outcore.ir.hardware import Tier
from outcore.ir.program import Copy, Program, Run
from outcore.ir.timeline import Cause, Timeline
from outcore.ir.trace import Phase, Trace
from outcore.report.planned import PlannedStep
from outcore.units import format_bytes, format_rate, format_seconds


class Track(Enum):
    """Parts of the machine that work in parallel. Slices of one track never overlap."""

    COMPUTE = "compute"
    OUT = "out to host"
    IN = "in from host"
    DISK_OUT = "out to disk"
    DISK_IN = "in from disk"


class Kind(Enum):
    """What a slice does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RERUN = "recomputed"
    OUT = "copied out"
    IN = "copied back"


@dataclass(frozen=True, slots=True)
class Slice:
    """One instruction while it executes: what a viewer shows as one box."""

    track: Track
    kind: Kind
    position: int
    """Position of the instruction in the program's body."""
    start_seconds: float
    stop_seconds: float
    name: str
    """Short name of the op or of the buffer."""
    site: str
    """Place in the model of the op that runs, or of the op that made what is copied."""
    op: int | None = None
    """The op that runs; None for a copy."""
    buffer: int | None = None
    """The buffer that is copied; None for a run."""
    nbytes: int = 0
    """Bytes copied; 0 for a run."""

    @property
    def seconds(self) -> float:
        """How long the instruction takes."""
        return self.stop_seconds - self.start_seconds

    @property
    def words(self) -> str:
        """A description for people: op, site, seconds, bytes."""
        place = f", {self.site}" if self.site else ""
        at = f"{format_seconds(self.seconds)} from {format_seconds(self.start_seconds)}"
        if self.op is not None:
            return f"op {self.op} {self.name}{place}: {self.kind.value}, {at}"
        rate = f", {format_rate(self.nbytes / self.seconds)}" if self.seconds > 0 else ""
        what = f"{self.name} (buffer {self.buffer}) of {format_bytes(self.nbytes)}"
        return f"{what}{place}: {self.track.value}, {at}{rate}"


@dataclass(frozen=True, slots=True)
class StallSpan:
    """A stretch in which compute waits, right before the instruction at `position`."""

    position: int
    cause: Cause
    start_seconds: float
    stop_seconds: float


def slices(step: PlannedStep, timeline: Timeline) -> list[Slice]:
    """All runs and copies of `timeline`, in order of body position."""
    trace, program = step.problem.trace, step.program
    makers = {b: op for op, made in enumerate(trace.writes) for b in made}
    found = []
    for span in timeline.spans:
        action = program.body[span.instruction].action
        times = span.instruction, span.start_seconds, span.stop_seconds
        if isinstance(action, Run):
            found.append(_run(trace, action, times))
        elif isinstance(action, Copy):
            found.append(_copy(trace, program, action, times, makers))
    return found


def pauses(timeline: Timeline) -> list[StallSpan]:
    """The stalls of `timeline`, each right before its instruction."""
    start = {span.instruction: span.start_seconds for span in timeline.spans}
    return [
        StallSpan(s.instruction, s.cause, start[s.instruction] - s.seconds, start[s.instruction])
        for s in timeline.stalls
        if s.instruction in start
    ]


def short(target: str) -> str:
    """An op's target without library and overload: `convolution` for `aten.convolution.default`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _run(trace: Trace, run: Run, times: tuple[int, float, float]) -> Slice:
    op = trace.ops[run.op]
    kind = Kind.FORWARD if op.phase is Phase.FORWARD else Kind.BACKWARD
    kind = Kind.RERUN if run.again else kind
    return Slice(Track.COMPUTE, kind, *times, name=short(op.target), site=op.site, op=op.id)


def _copy(
    trace: Trace,
    program: Program,
    copy: Copy,
    times: tuple[int, float, float],
    makers: dict[int, int],
) -> Slice:
    source, target = program.slots[copy.source], program.slots[copy.target]
    buffer = trace.buffers[source.buffer]
    maker = makers.get(buffer.id)
    leaves = source.tier is Tier.DEVICE
    if (target if leaves else source).tier is Tier.HOST:
        track = Track.OUT if leaves else Track.IN
    else:
        track = Track.DISK_OUT if leaves else Track.DISK_IN
    made = "" if maker is None else short(trace.ops[maker].target)
    return Slice(
        track,
        Kind.OUT if leaves else Kind.IN,
        *times,
        name=buffer.name or made or buffer.role.value,
        site="" if maker is None else trace.ops[maker].site,
        buffer=buffer.id,
        nbytes=buffer.nbytes,
    )
