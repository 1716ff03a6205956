"""Liveness: when each buffer is made and used, and the gaps between (SuperNeurons section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outcore.ir.once import once_per_trace
from outcore.ir.plan import Gap
from outcore.ir.trace import Effect, Trace


@dataclass(frozen=True, slots=True)
class Liveness:
    """Per buffer, indexed by id.

    `producer`: the op that makes it, None for what the caller passes. `uses`: the ops that touch
    it (the producer first), ascending. `held`: it stays from its making to the end, because the
    caller has it, or because an op mutates it (a copy made before would be stale after).
    """

    producer: tuple[int | None, ...]
    uses: tuple[tuple[int, ...], ...]
    held: tuple[bool, ...]


@once_per_trace
def liveness(trace: Trace) -> Liveness:
    """Producer, uses and ownership of every buffer of `trace`. Linear in ops."""
    producer: list[int | None] = [None] * len(trace.buffers)
    uses: list[list[int]] = [[] for _ in trace.buffers]
    for op, (reads, writes) in enumerate(zip(trace.reads, trace.writes, strict=True)):
        for buffer in reads:
            uses[buffer].append(op)
        for buffer in writes:
            producer[buffer] = op
            uses[buffer].append(op)
    results = set(trace.value_buffers((trace.outputs, trace.gradients)))
    for mutating in (op for op in trace.ops if Effect.MUTATES in op.effects):
        results |= set(trace.reads[mutating.id])
    held = tuple(b.borrowed or b.id in results for b in trace.buffers)
    return Liveness(tuple(producer), tuple(map(tuple, uses)), held)


@once_per_trace
def gaps(trace: Trace) -> tuple[Gap, ...]:
    """Every gap between two uses of every buffer that may leave the device, sorted.

    Gaps between neighbouring ops are left out: nothing can be gained there.
    """
    live = liveness(trace)
    return tuple(
        Gap(buffer, after, before)
        for buffer, uses in enumerate(live.uses)
        if not live.held[buffer]
        for after, before in _idle(trace, uses)
    )


def crossing_gaps(trace: Trace) -> tuple[Gap, ...]:
    """Those of them in which a buffer waits for the backward call."""
    return tuple(gap for gap in gaps(trace) if gap.after < trace.boundary <= gap.before)


@once_per_trace
def dead_gaps(trace: Trace) -> tuple[Gap, ...]:
    """The gap after its last use of every buffer that runs of forward ops again may want, sorted.

    It ends with the last op that needs what is made from the buffer. Few gradients wait so long
    that it pays to make them again: what only backward ops would read has no such gap. Linear in
    reads and writes.
    """
    live = liveness(trace)
    until: dict[int, int] = {}
    for op in reversed(trace.ops):
        if not op.repeatable or op.id >= trace.boundary:
            continue
        last = max((_needed_until(trace, live, until, b) for b in trace.writes[op.id]), default=0)
        for buffer in trace.reads[op.id]:
            if not live.held[buffer] and live.uses[buffer][-1] < last:
                until[buffer] = max(last, until.get(buffer, 0))
    return tuple(
        Gap(buffer, live.uses[buffer][-1], until[buffer], dead=True) for buffer in sorted(until)
    )


def _idle(trace: Trace, uses: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The neighbouring uses of a buffer between which something can be gained."""
    return ((a, b) for a, b in pairwise(uses) if b - a > 1 or trace.boundary == b)


def _needed_until(trace: Trace, live: Liveness, until: Mapping[int, int], buffer: int) -> int:
    """The last op that `buffer` may be made again for; 0 for none."""
    if live.held[buffer]:
        return 0
    return max(until.get(buffer, 0), *(b for _, b in _idle(trace, live.uses[buffer])), 0)
