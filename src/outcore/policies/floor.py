"""floor: the smallest device budget that some plan meets, and the plan that meets it.

A plan needs least memory when nothing overlaps: each copy is waited for on the spot. Lowering falls
back to that where the budget leaves no room, so the peak without overlap is what a plan can be made to
fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps, liveness
from outcore.ir.memory import fits
from outcore.ir.plan import Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.lower.donate import donate
from outcore.lower.draft import Draft, occupancy
from outcore.lower.expand import expand
from outcore.lower.place import place
from outcore.policies.candidates import candidates, recomputable
from outcore.policies.policy import MIN_BYTES


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest budget (`nbytes`, everything counted), and the op that sets it.

    `needed_bytes` is what that op alone needs: what it reads and writes, and its workspace.
    """

    nbytes: int
    op: str
    needed_bytes: int


def floor(problem: Problem) -> Floor:
    """The smallest device budget that some plan meets within the outer tiers' limits.

    The least over: every gap offloaded, the gaps across the boundary offloaded, everything kept; and,
    where the outer tiers have no room for the first two, what can be recomputed recomputed.
    """
    return min((plan_floor(problem, plan) for plan in _lean_plans(problem)), key=lambda f: f.nbytes)


def floor_plan(problem: Problem) -> Plan:
    """The plan to profile under: little memory, and sure to fit.

    Offloads the gaps across the boundary if that fits, else every gap, else whatever fits.
    Raises InfeasibleError below the floor.
    """
    for plan in _lean_plans(problem):
        if fits(problem, lower(problem, plan, fast=True)):
            return replace(plan, problem_digest=digest(problem))
    raise infeasible(problem, floor(problem))


def infeasible(problem: Problem, lowest: Floor, policy: str = "") -> InfeasibleError:
    """The error for a device budget below `lowest`, which is that of `policy` where one is named."""
    return InfeasibleError(
        budget_bytes=problem.budget_bytes,
        floor_bytes=lowest.nbytes,
        op=f"{lowest.op} under policy {policy}" if policy else lowest.op,
        needed_bytes=lowest.needed_bytes,
    )


def plan_floor(problem: Problem, plan: Plan) -> Floor:
    """The peak of `plan` without any overlap: the smallest budget its lowered program can fit."""
    draft = donate(problem.trace, expand(problem, plan))
    held = occupancy(problem, draft)
    peak = max(held.steps, default=0)
    if held.between > peak:
        pause = "the pause between the forward and the backward call"
        return Floor(held.between, pause, problem.between_bytes)
    if not held.steps:
        return Floor(0, "an empty trace", 0)
    return _at(problem, draft, held.steps.index(peak), peak)


def _at(problem: Problem, draft: Draft, step: int, peak: int) -> Floor:
    run = draft.steps[step].run
    op = problem.trace.ops[run.op]
    given = {target for _, target in run.donate}
    touched = sum(draft.slots[s].nbytes for s in (*run.reads, *run.writes) if s not in given)
    where = f"op {op.id} {op.target}" + (f" at {op.site}" if op.site else "")
    return Floor(peak, where, touched + problem.profile.workspace_bytes[run.op])


def _lean_plans(problem: Problem) -> Iterator[Plan]:
    """Plans of little memory that stay inside the outer tiers' limits; the last keeps everything."""
    buffers = problem.trace.buffers
    crossing = candidates(problem, MIN_BYTES)
    every = [g for g in gaps(problem.trace, liveness(problem.trace)) if buffers[g.buffer].nbytes]
    offloads = map(partial(_offloading, problem), (crossing, every))
    within = [plan for plan in offloads if _outer_fits(problem, plan)]
    yield from within or filter(partial(_outer_fits, problem), _recomputing(problem))
    yield make_plan({}, "floor")


def _offloading(problem: Problem, among: Iterable[Gap]) -> Plan:
    leave = Offload(problem.hardware.outer)
    return make_plan(dict.fromkeys(among, leave), "floor")


def _recomputing(problem: Problem) -> Iterator[Plan]:
    """Recompute what crosses the boundary and can be made again; offload the rest, or keep it."""
    crossing = candidates(problem, 1)
    again = recomputable(problem, crossing)
    recompute: dict[Gap, Choice] = {gap: Recompute() for gap in crossing if gap in again}
    rest = dict.fromkeys(set(crossing) - again, Offload(problem.hardware.outer))
    yield make_plan(recompute | rest, "floor")
    yield make_plan(recompute, "floor")


def _outer_fits(problem: Problem, plan: Plan) -> bool:
    slots = place(donate(problem.trace, expand(problem, plan))).slots
    outer = (slot for slot in slots if slot.tier is not Tier.DEVICE)
    return all(slot.offset + slot.nbytes <= problem.limit_bytes(slot.tier) for slot in outer)
