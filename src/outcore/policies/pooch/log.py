"""log: what PoocH records of a profiled step, here derived from the trace, op by op.

The log has memory and time of the step with everything kept. The model subtracts what a plan moves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.memory import added_bytes
from outcore.ir.plan import KEEP_ALL, Gap
from outcore.ir.problem import Problem
from outcore.lower.donate import donate
from outcore.lower.draft import Draft, Step
from outcore.lower.expand import expand
from outcore.policies.candidates import recomputable


class Kind(Enum):
    """What happens to a target."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


KEEP, OFFLOAD, RECOMPUTE = Kind


@dataclass(frozen=True, slots=True)
class Target:
    """A candidate gap: its device memory before and after its copies, and their times."""

    gap: Gap
    nbytes: int
    """Device bytes before it is copied out."""
    fetched_bytes: int
    """Device bytes once a copy has filled it."""
    out_seconds: float
    """Time of its copy out."""
    in_seconds: float
    """Time of its copy back."""
    recomputable: bool
    last_segment: int
    """The segment of its last use."""

    @property
    def padding_bytes(self) -> int:
        """Bytes that it needs in addition after a copy."""
        return self.fetched_bytes - self.nbytes


@dataclass(frozen=True, slots=True)
class LoggedOp:
    """Time and memory of one op."""

    seconds: float
    alloc_bytes: int
    """Memory that is allocated before it runs."""
    workspace_bytes: int
    """Memory that it needs in addition while it runs."""
    free_bytes: int
    """Memory that is freed after it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Backward ops from a break point (the first need of some target) up to the next one."""

    op: int
    """The first op of the segment."""
    wanted: tuple[int, ...]
    """Targets that `op` is the first to need."""
    seconds: float
    """Compute of the segment with everything kept."""
    start_bytes: int
    """Bytes held before `op`, with everything kept."""
    peak_bytes: int
    """The most bytes held inside the segment, with everything kept."""


@dataclass(frozen=True, slots=True)
class Log:
    """A step with everything kept."""

    targets: tuple[Target, ...]
    start_bytes: int
    """Bytes at the start of the step."""
    forward: tuple[LoggedOp, ...]
    """The forward ops."""
    leaving: tuple[tuple[int, ...], ...]
    """Per forward op: the targets whose last forward use it is."""
    boundary_bytes: int
    """Bytes that must be available between the two calls."""
    lead_in: Segment
    """The backward ops before the first break point."""
    segments: tuple[Segment, ...]
    """The backward ops from there, by break point."""

    @property
    def boundary(self) -> int:
        """The first backward op."""
        return len(self.forward)


def record(problem: Problem, gaps: Sequence[Gap], tier: Tier) -> Log:
    """The log of `problem` for candidates `gaps`, in order of copy-out to `tier`. Linear in ops."""
    draft = donate(problem.trace, expand(problem, KEEP_ALL))
    boundary = problem.trace.boundary
    breaks = sorted({gap.before for gap in gaps})
    targets = _targets(problem, gaps, breaks, tier)
    ops = [_logged(problem, draft, step) for step in draft.steps]
    start = problem.outside_bytes + sum(draft.slots[s].nbytes for s in draft.arguments)
    given = sum(draft.slots[s].nbytes for s in draft.tangents)
    levels = _levels(ops, start, boundary, given)
    leaving = _by_op([gap.after for gap in gaps])
    wanted = _by_op([gap.before for gap in gaps])
    segments = [
        _segment(ops, levels, span, tuple(wanted[span[0]]))
        for span in pairwise([boundary, *breaks, len(ops)])
    ]
    between = levels[boundary] + problem.between_bytes
    return Log(
        targets,
        start,
        tuple(ops[:boundary]),
        tuple(tuple(leaving[op]) for op in range(boundary)),
        between,
        segments[0],
        tuple(segments[1:]),
    )


def _by_op(ops: Sequence[int]) -> defaultdict[int, list[int]]:
    """Op -> the positions at which `ops` has it."""
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for position, op in enumerate(ops):
        positions[op].append(position)
    return positions


def _targets(
    problem: Problem, gaps: Sequence[Gap], breaks: Sequence[int], tier: Tier
) -> tuple[Target, ...]:
    """The targets of `gaps`; `breaks`: the first op of each segment."""
    again = recomputable(problem, gaps)
    uses = liveness(problem.trace).uses
    last_use = {gap: uses[gap.buffer][-1] for gap in gaps}
    return tuple(
        _target(problem, gap, tier, bisect_right(breaks, last_use[gap]) - 1, again=gap in again)
        for gap in gaps
    )


def _target(problem: Problem, gap: Gap, tier: Tier, last_segment: int, *, again: bool) -> Target:
    """The target of `gap`; `again`: whether it can be recomputed."""
    hardware, outer = problem.hardware, tier
    nbytes = problem.trace.buffers[gap.buffer].nbytes
    return Target(
        gap,
        hardware.slot_bytes(Tier.DEVICE, nbytes, copied=False),
        hardware.slot_bytes(Tier.DEVICE, nbytes, copied=True),
        hardware.link(Tier.DEVICE, outer).seconds(nbytes),
        hardware.link(outer, Tier.DEVICE).seconds(nbytes),
        again,
        last_segment,
    )


def _logged(problem: Problem, draft: Draft, step: Step) -> LoggedOp:
    """The log entry of the op of `step`."""
    op = step.run.op
    return LoggedOp(
        problem.profile.seconds[op],
        sum(added_bytes(draft.slots, action) for action in step.before),
        problem.profile.workspace_bytes[op],
        -sum(added_bytes(draft.slots, action) for action in step.after),
    )


def _levels(ops: Sequence[LoggedOp], start: int, boundary: int, tangents: int) -> list[int]:
    """Bytes held before each op, and at the end; tangents arrive at the boundary."""
    level = start + (0 if boundary else tangents)
    levels = [level]
    for index, op in enumerate(ops, 1):
        level += op.alloc_bytes - op.free_bytes + (tangents if index == boundary else 0)
        levels.append(level)
    return levels


def _segment(
    ops: Sequence[LoggedOp],
    levels: Sequence[int],
    span: tuple[int, int],
    wanted: tuple[int, ...],
) -> Segment:
    """The segment of the ops in `span` (its first op, and the op after its last)."""
    first, stop = span
    inside = range(first, stop)
    peaks = (levels[i] + ops[i].alloc_bytes + ops[i].workspace_bytes for i in inside)
    seconds = sum(ops[i].seconds for i in inside)
    return Segment(first, wanted, seconds, levels[first], max(peaks, default=0))
