"""Liveness: when each buffer is made and used, and the gaps between (SuperNeurons section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
    held = tuple(b.pinned or b.id in results for b in trace.buffers)
    return Liveness(tuple(producer), tuple(map(tuple, uses)), held)


def gaps(trace: Trace, live: Liveness) -> tuple[Gap, ...]:
    """Every gap of every buffer that may leave the device, sorted.

    Gaps between neighbouring ops are left out: nothing can be gained there.
    """
    return tuple(
        Gap(buffer, after, before)
        for buffer, uses in enumerate(live.uses)
        if not live.held[buffer]
        for after, before in pairwise(uses)
        if before - after > 1 or trace.boundary == before
    )
