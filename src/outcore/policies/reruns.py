"""reruns: limit how many ops recomputations run again."""

from __future__ import annotations

from collections.abc import Iterable

from outcore.ir.liveness import liveness
from outcore.ir.plan import Gap
from outcore.ir.trace import Trace
from outcore.policies.candidates import ops_again

MOST_AGAIN = 1_000_000
"""About how many ops may run again in all if nothing limits them. In networks of thousands of
layers their number would be the square of the layers, a program that no memory holds."""


def limited(trace: Trace, gaps: Iterable[Gap], max_ops: int = 0) -> list[Gap]:
    """Those of `gaps`, in forward order, that need at most `max_ops` ops to recompute.

    Each recomputation drops what it passes through. The others are starts for those after them.
    `max_ops` 0: any number of ops, as far as `MOST_AGAIN` allows.
    """
    gaps = list(gaps)
    most = max_ops
    if not most and len(gaps) * trace.boundary > 2 * MOST_AGAIN:
        most = max(1, 2 * MOST_AGAIN // len(gaps))
    if not most:
        return gaps
    live = liveness(trace)
    dropped: dict[int, int] = {}
    cheap = []
    for gap in gaps:
        if len(ops_again(trace, live, gap, dropped)) <= most:
            cheap.append(gap)
            dropped[gap.buffer] = gap.before
    return cheap
