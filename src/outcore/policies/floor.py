"""floor: find the smallest device budget that some plan meets, and the plan that meets it.

A plan needs the least memory when nothing overlaps: compute waits for each copy immediately.
Lowering falls back to that if the budget leaves no room. So the peak without overlap is the
smallest budget that a plan can be made to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.errors import InfeasibleError
from outcore.ir.memory import fits
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.ir.trace import Role, Trace
from outcore.lower import lower
from outcore.lower.donate import donate
from outcore.lower.expand import expand
from outcore.policies.lean import lean_plans
from outcore.policies.summit import summit


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest budget, and the op that sets it."""

    nbytes: int
    """The smallest budget, in bytes, with everything counted."""
    op: str
    """The op that needs the most, with its place in the model, or the moment if no op runs then."""
    needed_bytes: int
    """What the step holds at that op: `nbytes` minus the problem's `outside_bytes`."""


def floor(problem: Problem) -> Floor:
    """The smallest device budget that some plan meets within the outer tiers' limits.

    It is the least of `lean_plans`.
    """
    return leanest(problem)[0]


def leanest(problem: Problem) -> tuple[Floor, Plan]:
    """The floor, and the plan that meets it."""
    found = ((plan_floor(problem, plan), plan) for plan in lean_plans(problem))
    return min(found, key=lambda pair: pair[0].nbytes)


def floor_plan(problem: Problem) -> Plan:
    """The plan to profile under: it needs little memory, and is sure to fit.

    Offloads the gaps across the boundary if that fits, else every gap, else uses whichever of
    `lean_plans` fits. Raises InfeasibleError below the floor.
    """
    for plan in lean_plans(problem):
        if fits(problem, lower(problem, plan, fast=True)):
            digests = digest(problem), digest(problem.trace)
            return replace(plan, problem_digest=digests[0], trace_digest=digests[1])
    raise infeasible(problem, floor(problem))


def leanest_plan(problem: Problem) -> Plan:
    """The plan that meets the floor. Raises InfeasibleError below the floor."""
    lowest, plan = leanest(problem)
    if not fits(problem, lower(problem, plan, fast=True)):
        raise infeasible(problem, lowest)
    return plan


def infeasible(problem: Problem, lowest: Floor, policy: str = "") -> InfeasibleError:
    """The error for a device budget below `lowest`, the floor of `policy` if one is named."""
    return InfeasibleError(
        budget_bytes=problem.budget_bytes,
        floor_bytes=lowest.nbytes,
        op=lowest.op,
        policy=policy,
        needed_bytes=lowest.needed_bytes,
        weights_bytes=_weights_bytes(problem.trace),
    )


def _weights_bytes(trace: Trace) -> int:
    """Bytes of parameters, module buffers and parameter gradients.

    They are on the device at the end of backward under any plan, and are the same for any batch
    size.
    """
    held = {b.id for b in trace.buffers if b.borrowed and b.role in {Role.PARAM, Role.STATE}}
    for value, gradient in zip(trace.inputs, trace.gradients, strict=False):
        buffer = trace.buffers[trace.values[value].buffer]
        if buffer.role is Role.PARAM:
            held.update(trace.value_buffers(gradient))
    return sum(trace.buffers[b].nbytes for b in held)


def plan_floor(problem: Problem, plan: Plan) -> Floor:
    """The peak of `plan` without overlap: the smallest budget that its program can fit."""
    draft = donate(problem.trace, expand(problem, plan))
    most = summit(problem, draft)
    where = most.where(problem, draft)
    return Floor(most.nbytes, where, max(0, most.nbytes - problem.outside_bytes))
