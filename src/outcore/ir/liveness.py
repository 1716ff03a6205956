"""liveness: when each buffer is made and used, and its idle gaps (SuperNeurons section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outcore.ir.family import once_per_family
from outcore.ir.once import once_per_trace
from outcore.ir.plan import Gap
from outcore.ir.trace import Effect, Ref, Trace


@dataclass(frozen=True, slots=True)
class Liveness:
    """Facts about each buffer, indexed by buffer id.

    `producer`: the op that makes it; None if the caller passes it. `uses`: the ops that touch it,
    ascending, the producer included. `held`: it stays on the device until the end, because the
    caller has it, because an op mutates it (an earlier copy would be stale afterwards), or because
    no op runs once it is passed in, so none could free it.
    """

    producer: tuple[int | None, ...]
    uses: tuple[tuple[int, ...], ...]
    held: tuple[bool, ...]


@once_per_trace
@once_per_family
def liveness(trace: Trace) -> Liveness:
    """The producer, the uses and whether it is held, for every buffer of `trace`. Linear in ops."""
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
    results |= set(trace.value_buffers(tuple(map(Ref, _last_passed_in(trace)))))
    held = tuple(b.borrowed or b.id in results for b in trace.buffers)
    return Liveness(tuple(producer), tuple(map(tuple, uses)), held)


def _last_passed_in(trace: Trace) -> Iterator[int]:
    """The values that are passed in after the last op."""
    if not trace.ops:
        yield from trace.inputs
    if trace.boundary == len(trace.ops):
        yield from trace.tangents


@once_per_trace
@once_per_family
def gaps(trace: Trace) -> tuple[Gap, ...]:
    """Every gap between two uses of every buffer that may leave the device, sorted.

    Gaps between adjacent ops are left out, because nothing can be gained there. Those across the
    boundary are included.
    """
    live = liveness(trace)
    return tuple(
        Gap(buffer, after, before)
        for buffer, uses in enumerate(live.uses)
        if not live.held[buffer]
        for after, before in _idle(trace, uses)
    )


def crossing_gaps(trace: Trace) -> tuple[Gap, ...]:
    """The gaps in which a buffer waits for the backward call."""
    return tuple(gap for gap in gaps(trace) if gap.after < trace.boundary <= gap.before)


@once_per_trace
@once_per_family
def dead_gaps(trace: Trace) -> tuple[Gap, ...]:
    """The dead gap of every buffer that a rerun of a forward op may read, sorted.

    A dead gap starts at the last use of the buffer. It ends with the last op that needs what is
    made from the buffer. A buffer that only backward ops would read again has no dead gap: few
    gradients wait long enough to be worth recomputing. Linear in reads and writes.
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
    """The pairs of successive uses of a buffer between which something can be gained."""
    return ((a, b) for a, b in pairwise(uses) if b - a > 1 or trace.boundary == b)


def _needed_until(trace: Trace, live: Liveness, until: Mapping[int, int], buffer: int) -> int:
    """The last op that `buffer` may be recomputed for; 0 if there is none."""
    if live.held[buffer]:
        return 0
    return max(until.get(buffer, 0), *(b for _, b in _idle(trace, live.uses[buffer])), 0)
