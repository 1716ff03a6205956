"""checkpoints: find where the forward pass can be cut into segments that are recomputed one by one.

These are the segments of Chen et al. (`chen.py`); the floor's plans use them, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isqrt

from outcore.ir.plan import Choice, Gap, Recompute
from outcore.ir.problem import Problem
from outcore.policies.candidates import recomputable


def articulation_points(problem: Problem) -> tuple[int, ...]:
    """Buffers that alone connect the forward ops before them with those after, in execution order.

    What the caller holds (parameters, inputs) does not connect ops. Linear in the forward ops.
    """
    trace = problem.trace
    forward = range(trace.boundary)
    last_read = {b: op for op in forward for b in trace.reads[op]}
    held = {b.id for b in trace.buffers if b.borrowed}
    across: set[int] = set()
    points: list[int] = []
    for op in forward:
        made = {b for b in trace.writes[op] if last_read.get(b, -1) > op} - held
        across |= made
        across -= {b for b in trace.reads[op] if last_read[b] <= op}
        if len(across) == 1 and across == made:
            points += across
    return tuple(points)


def crossing_points(problem: Problem, gaps: Sequence[Gap]) -> tuple[int, ...]:
    """The articulation points among the buffers of `gaps`."""
    crossing = {gap.buffer for gap in gaps}
    return tuple(b for b in articulation_points(problem) if b in crossing)


def between(
    problem: Problem, gaps: Sequence[Gap], checkpoints: Collection[int]
) -> dict[Gap, Choice]:
    """Recompute every gap, except if its buffer is a checkpoint or cannot be recomputed."""
    kept, again = set(checkpoints), recomputable(problem, gaps)
    return {gap: Recompute(stay=True) for gap in gaps if gap.buffer not in kept and gap in again}


def between_every_root(problem: Problem, gaps: Sequence[Gap]) -> dict[Gap, Choice]:
    """As `between`, with every k-th articulation point as a checkpoint, k the root of their number.

    Each op runs again about once.
    """
    points = crossing_points(problem, gaps)
    step = max(1, isqrt(len(points)))
    return between(problem, gaps, points[step - 1 :: step])
