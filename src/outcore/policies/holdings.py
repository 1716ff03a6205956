"""holdings: list what is on the device at the floor, and why it has to be there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.ir.trace import Role
from outcore.lower.donate import donate
from outcore.lower.draft import Draft
from outcore.lower.expand import expand
from outcore.policies.floor import Floor, leanest
from outcore.policies.summit import Summit, device_slots, summit


class Why(StrEnum):
    """Why a buffer is on the device at that moment."""

    READ = "read by the op"
    WRITTEN = "written by the op"
    HELD = "held by the caller or until the end"
    WAITS = "waits for an op nearby"
    """Its gap is between neighboring ops, or the plan keeps it."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Buffers of one role that are on the device for one reason."""

    why: Why
    role: Role
    buffers: int
    """The number of buffers."""
    nbytes: int
    """Bytes of these buffers together."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """The floor, the op that sets it, and everything that is on the device while it runs.

    The bytes of `holdings`, `workspace_bytes`, `between_bytes` and `outside_bytes` add up to the
    floor.
    """

    floor: Floor
    op: int | None
    """None if the peak is the pause between the calls, or what the caller passes in."""
    holdings: tuple[Holding, ...]
    """Groups of buffers, the largest first."""
    workspace_bytes: int
    """The workspace of `op`; 0 if it is None."""
    between_bytes: int
    """What the rest of the step needs in the pause; 0 if the peak is not the pause."""
    outside_bytes: int
    """What the process holds outside the graph."""


def floor_holdings(problem: Problem) -> Holdings:
    """What the plan of the floor holds at its peak. Linear in the ops that it runs."""
    lowest, plan = leanest(problem)
    draft = donate(problem.trace, expand(problem, plan))
    most = summit(problem, draft)
    op = most.op(draft)
    workspace = 0
    if op is not None and most.step is not None:
        workspace = problem.profile.cost(op, plan.variant(op)).workspace_bytes
    return Holdings(
        lowest,
        op,
        _grouped(problem, draft, most),
        workspace,
        problem.between_bytes if most.paused else 0,
        problem.outside_bytes,
    )


def _grouped(problem: Problem, draft: Draft, most: Summit) -> tuple[Holding, ...]:
    """Add up the slots on the device by reason and role."""
    nbytes: Counter[tuple[Why, Role]] = Counter()
    buffers: Counter[tuple[Why, Role]] = Counter()
    for slot, why in _reasons(problem, draft, most):
        kind = (why, problem.trace.buffers[draft.slots[slot].buffer].role)
        nbytes[kind] += draft.slots[slot].nbytes
        buffers[kind] += 1
    return tuple(Holding(*kind, buffers[kind], total) for kind, total in nbytes.most_common())


def _reasons(problem: Problem, draft: Draft, most: Summit) -> Iterator[tuple[int, Why]]:
    """Each slot that is on the device at the peak, and why."""
    held = liveness(problem.trace).held
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    if most.step is not None and not most.paused:
        run = draft.steps[most.step].run
        reads, writes = run.reads, run.writes
    for slot in sorted(device_slots(draft, most)):
        if slot in reads:
            yield slot, Why.READ
        elif slot in writes:
            yield slot, Why.WRITTEN
        else:
            yield slot, Why.HELD if held[draft.slots[slot].buffer] else Why.WAITS
