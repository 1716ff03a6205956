"""What PoocH records of a profiled step, derived from the trace: memory and time, op by op.

The log is that of the step with everything kept. What a plan moves is subtracted by the model.
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
from outcore.ir.plan import Gap, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Free
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
    """A candidate: what it takes of the device before and after its copies, and their times."""

    gap: Gap
    nbytes: int
    fetched_bytes: int
    out_seconds: float
    in_seconds: float
    recomputable: bool
    last_segment: int
    """The segment of its last use."""

    @property
    def padding_bytes(self) -> int:
        """What it takes more after a copy than before."""
        return self.fetched_bytes - self.nbytes


@dataclass(frozen=True, slots=True)
class LoggedOp:
    """One op: memory it takes before it runs, while it runs, and gives back after."""

    seconds: float
    alloc_bytes: int
    workspace_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Backward ops from a break point (the first need of some target) up to the next.

    `wanted` are the targets first needed by `op`, the first op of the segment.
    """

    op: int
    wanted: tuple[int, ...]
    seconds: float
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Log:
    """A step with everything kept: bytes at its start, forward ops, backward segments.

    `boundary_bytes` is what must be there between the two calls, `lead_in` the backward ops before
    the first break point, `leaving` the targets that forward op i uses last.
    """

    targets: tuple[Target, ...]
    start_bytes: int
    forward: tuple[LoggedOp, ...]
    leaving: tuple[tuple[int, ...], ...]
    boundary_bytes: int
    lead_in: Segment
    segments: tuple[Segment, ...]

    @property
    def boundary(self) -> int:
        """The first backward op."""
        return len(self.forward)


def record(problem: Problem, gaps: Sequence[Gap], tier: Tier) -> Log:
    """The log of `problem` for candidates `gaps`, in order of copy-out to `tier`. Linear in ops."""
    draft = donate(problem.trace, expand(problem, Plan(())))
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
    again = recomputable(problem, gaps)
    uses = liveness(problem.trace).uses
    last_use = {gap: uses[gap.buffer][-1] for gap in gaps}
    return tuple(
        _target(problem, gap, tier, bisect_right(breaks, last_use[gap]) - 1, again=gap in again)
        for gap in gaps
    )


def _target(problem: Problem, gap: Gap, tier: Tier, last_segment: int, *, again: bool) -> Target:
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
    op = step.run.op
    return LoggedOp(
        problem.profile.seconds[op],
        _change(draft, step.before),
        problem.profile.workspace_bytes[op],
        -_change(draft, step.after),
    )


def _change(draft: Draft, actions: Sequence[Action]) -> int:
    """Bytes that `actions` of a step without copies take."""
    taken = sum(draft.slots[a.slot].nbytes for a in actions if isinstance(a, Alloc))
    return taken - sum(draft.slots[a.slot].nbytes for a in actions if isinstance(a, Free))


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
    first, stop = span
    inside = range(first, stop)
    peaks = (levels[i] + ops[i].alloc_bytes + ops[i].workspace_bytes for i in inside)
    seconds = sum(ops[i].seconds for i in inside)
    return Segment(first, wanted, seconds, levels[first], max(peaks, default=0))
