"""floor: find the smallest device budget that some plan meets, and the plan that meets it.

A plan needs the least memory when nothing overlaps: compute waits for each copy immediately.
Lowering falls back to that if the budget leaves no room. So the peak without overlap is the
smallest budget that a plan can be made to fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps
from outcore.ir.memory import fits
from outcore.ir.plan import Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.store import digest
from outcore.ir.trace import Role, Trace
from outcore.lower import lower
from outcore.lower.donate import donate
from outcore.lower.expand import expand
from outcore.lower.place import place
from outcore.policies.candidates import away, candidates, recomputable
from outcore.policies.policy import MIN_BYTES
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

    It is the least of these plans: every gap offloaded, the gaps across the boundary offloaded,
    everything kept. If the outer tiers have no room for the first two, plans that recompute what
    can be recomputed replace them. Ops run as the variants with the smallest workspaces.
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


def lean_plans(problem: Problem) -> Iterator[Plan]:
    """Plans of little memory inside the outer tiers' limits; the last keeps everything."""
    variants = _smallest_workspaces(problem.profile)

    def plan(choices: dict[Gap, Choice]) -> Plan:
        return make_plan(choices, "floor", variants=variants)

    offloading = [p for p in map(plan, _offloading(problem)) if _outer_fits(problem, p)]
    recomputing = map(plan, _recomputing(problem))
    yield from offloading or filter(partial(_outer_fits, problem), recomputing)
    yield plan({})


def _smallest_workspaces(profile: Profile) -> dict[int, int]:
    """Op -> its variant with the smallest workspace, for the ops that have alternatives."""

    def workspace(op: int, variant: int) -> int:
        return profile.cost(op, variant).workspace_bytes

    return {
        op: min(range(len(costs) + 1), key=partial(workspace, op))
        for op, costs in profile.alternatives
    }


def _offloading(problem: Problem) -> Iterator[dict[Gap, Choice]]:
    """Offload the gaps across the boundary, then every gap; nothing without an outer tier."""
    leave = away(problem)
    if isinstance(leave, Offload):
        trace = problem.trace
        every = gaps(trace)
        yield dict.fromkeys(candidates(problem, MIN_BYTES), leave)
        yield {g: leave for g in every if trace.buffers[g.buffer].nbytes}


def _recomputing(problem: Problem) -> Iterator[dict[Gap, Choice]]:
    """Recompute what crosses the boundary if possible; offload the rest, then keep it."""
    crossing = candidates(problem, 1)
    again: dict[Gap, Choice] = dict.fromkeys(recomputable(problem, crossing), Recompute())
    rest: dict[Gap, Choice] = dict.fromkeys(crossing, away(problem))
    yield rest | again
    yield again


def _outer_fits(problem: Problem, plan: Plan) -> bool:
    """Whether `plan`, without overlap, stays inside the limits of the outer tiers."""
    slots = place(donate(problem.trace, expand(problem, plan))).slots
    outer = (slot for slot in slots if slot.tier is not Tier.DEVICE)
    return all(slot.offset + slot.nbytes <= problem.limit_bytes(slot.tier) for slot in outer)
