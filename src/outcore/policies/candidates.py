"""candidates: list the gaps that PoocH and similar policies decide on.

The gaps belong to PoocH's "feature maps": buffers that are made or passed in before the boundary
and needed after it. Exactly one gap of each buffer crosses the boundary. Its other uses are close
together, so it stays on the device between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from types import MappingProxyType

from outcore.ir.liveness import Liveness, crossing_gaps, liveness
from outcore.ir.plan import KEEP, Gap, Keep, Offload
from outcore.ir.problem import Problem
from outcore.ir.trace import Effect, Trace

NOTHING: Mapping[int, int] = MappingProxyType({})
"""Default of `dropped` in `ops_again`: no buffer is dropped."""


def candidates(problem: Problem, min_bytes: int) -> tuple[Gap, ...]:
    """Gaps across the boundary of buffers of at least `min_bytes`, in order of their copies out.

    This is the order of the last forward use, as in PoocH's code, which copies a map out when its
    variable dies. Buffers that one op uses last are in the order of its arguments, then of its
    results.
    """
    trace = problem.trace
    wanted = (
        g for g in crossing_gaps(trace) if trace.buffers[g.buffer].nbytes >= max(1, min_bytes)
    )
    return tuple(sorted(wanted, key=lambda g: (g.after, _rank(trace, g))))


def _rank(trace: Trace, gap: Gap) -> int:
    """Position of the gap's buffer among the arguments and results of the op before the gap."""
    return (*trace.reads[gap.after], *trace.writes[gap.after]).index(gap.buffer)


def away(problem: Problem) -> Offload | Keep:
    """The choice for what leaves: offload to the nearest outer tier; Keep if it has no room.

    A disk beyond a host does not replace a host without budget: copies to and from that disk pass
    through host memory. `overflow` is what uses it.
    """
    tier = problem.hardware.outer
    room = min(problem.hardware.capacity(tier), problem.limit_bytes(tier))
    return Offload(tier) if room > 0 else KEEP


def recomputable(problem: Problem, among: Iterable[Gap]) -> frozenset[Gap]:
    """The gaps of `among` whose buffer can be recomputed at the end, whatever the other gaps get.

    Every op that has to run again must be repeatable, and must find what it reads in memory or
    recompute it. What it reads must be unchanged: if a later op mutates it, the gap does not count.
    Linear in ops.
    """
    until = _again_until(problem.trace, liveness(problem.trace))
    return frozenset(gap for gap in among if gap.before <= until[gap.buffer])


def _again_until(trace: Trace, live: Liveness) -> list[float]:
    """Per buffer, the last op for which it can be recomputed; inf: any op; below 0: none.

    A buffer that the recomputation reads is on the device up to its last use. After that it can be
    recomputed, up to its own limit.
    """
    mutated = _last_mutation(trace)
    until = [-1.0] * len(trace.buffers)
    for op in trace.ops:
        if not op.repeatable or any(mutated.get(b, -1) > op.id for b in trace.reads[op.id]):
            continue
        found = (
            inf if live.held[b] else max(live.uses[b][-1], until[b]) for b in trace.reads[op.id]
        )
        last = min(found, default=inf)
        for buffer in trace.writes[op.id]:
            if live.producer[buffer] == op.id:
                until[buffer] = last
    return until


def ops_again(
    trace: Trace, live: Liveness, gap: Gap, dropped: Mapping[int, int] = NOTHING
) -> set[int | None]:
    """The ops to run again to recompute the buffer of `gap` at its end; None for what no op makes.

    A buffer is gone if its last use is before the gap's end. A buffer in `dropped` (buffer -> the
    op that it is recomputed for) is gone until that op. Linear in the ops returned.
    """
    ops: set[int | None] = set()
    seen = {gap.buffer}
    stack = [gap.buffer]
    while stack:
        producer = live.producer[stack.pop()]
        ops.add(producer)
        reads = () if producer is None else trace.reads[producer]
        for buffer in reads:
            gone = not live.held[buffer] and live.uses[buffer][-1] < gap.before
            if (gone or dropped.get(buffer, -1) >= gap.before) and buffer not in seen:
                seen.add(buffer)
                stack.append(buffer)
    return ops


def _last_mutation(trace: Trace) -> dict[int, int]:
    """Buffer -> the last op that may have written to it in place."""
    mutating = (op.id for op in trace.ops if Effect.MUTATES in op.effects)
    return {buffer: op for op in mutating for buffer in trace.reads[op]}
