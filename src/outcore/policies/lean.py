"""lean: plans that need little device memory, inside the limits of the outer tiers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps
from outcore.ir.plan import Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.lower.donate import donate
from outcore.lower.expand import expand
from outcore.lower.place import place
from outcore.policies.candidates import away, candidates, recomputable
from outcore.policies.checkpoints import between_every_root
from outcore.policies.policy import MIN_BYTES
from outcore.policies.reruns import limited

FEW_OPS = 32
"""A recomputation takes long with more ops than this: a plan without such ones comes first."""


def lean_plans(problem: Problem) -> Iterator[Plan]:
    """Plans of little memory inside the outer tiers' limits; one of them keeps everything.

    The first offload the gaps across the boundary, then every gap. If the outer tiers have no room
    for the latter, plans follow that recompute, and that offload only some gaps. Ops run as the
    variants with the smallest workspaces. Every plan is made only when it is asked for.
    """
    variants = _smallest_workspaces(problem.profile)
    found: list[dict[Gap, Choice]] = []
    for choices in _choices(problem):
        if choices not in found:
            found.append(choices)
            yield make_plan(choices, "floor", variants=variants)


def _smallest_workspaces(profile: Profile) -> dict[int, int]:
    """Op -> its variant with the smallest workspace, for the ops that have alternatives."""

    def workspace(op: int, variant: int) -> int:
        return profile.cost(op, variant).workspace_bytes

    return {
        op: min(range(len(costs) + 1), key=partial(workspace, op))
        for op, costs in profile.alternatives
    }


def _choices(problem: Problem) -> Iterator[dict[Gap, Choice]]:
    """The choices of `lean_plans`; some may come twice."""
    enough = False
    for choices in _offloading(problem):
        enough = _outer_fits(problem, choices)
        if enough:
            yield choices
    if not enough:
        yield from _with_little_room(problem)
    yield {}


def _offloading(problem: Problem) -> Iterator[dict[Gap, Choice]]:
    """Offload the gaps across the boundary, then every gap; nothing without an outer tier."""
    leave = away(problem)
    if isinstance(leave, Offload):
        trace = problem.trace
        every = gaps(trace)
        yield dict.fromkeys(candidates(problem, MIN_BYTES), leave)
        yield {g: leave for g in every if trace.buffers[g.buffer].nbytes}


def _with_little_room(problem: Problem) -> Iterator[dict[Gap, Choice]]:
    """Recompute more and more at the cost of time; offload the rest as far as there is room.

    What there is no room for is kept. The last two offload only, and recompute only. Those that
    recompute come first: graphs that wait together need the memory more than the time.
    """
    crossing = candidates(problem, 1)
    recomputing = _recomputing(problem, crossing)
    for again in (*recomputing, {}):
        yield again | _offloaded(problem, [gap for gap in crossing if gap not in again])
    yield recomputing[-1]


def _recomputing(problem: Problem, crossing: Sequence[Gap]) -> Sequence[dict[Gap, Choice]]:
    """Recompute whatever can be; where that takes long, first one segment at a time, then less.

    Segments run each op again about once; the others drop what a recomputation passes through.
    """
    among = recomputable(problem, crossing)
    again = [gap for gap in crossing if gap in among]
    few, every = (limited(problem.trace, again, most) for most in (FEW_OPS, 0))
    dropping: list[dict[Gap, Choice]] = [dict.fromkeys(each, Recompute()) for each in (few, every)]
    return dropping[1:] if few == every else [between_every_root(problem, crossing), *dropping]


def _offloaded(problem: Problem, crossing: Sequence[Gap]) -> dict[Gap, Choice]:
    """Offload the first of the gaps `crossing` the boundary, as many as there is room for.

    What crosses the boundary keeps its place in the outer tier, so nothing shares its bytes.
    """
    leave = away(problem)
    if not isinstance(leave, Offload):
        return {}
    buffers, size = problem.trace.buffers, problem.hardware.slot_bytes
    nbytes = (size(leave.tier, buffers[gap.buffer].nbytes, copied=True) for gap in crossing)
    count = bisect_right(list(accumulate(nbytes)), problem.limit_bytes(leave.tier))
    return dict.fromkeys(crossing[:count], leave)


def _outer_fits(problem: Problem, choices: dict[Gap, Choice]) -> bool:
    """Whether these choices, without overlap, stay inside the limits of the outer tiers."""
    slots = place(donate(problem.trace, expand(problem, make_plan(choices)))).slots
    outer = (slot for slot in slots if slot.tier is not Tier.DEVICE)
    return all(slot.offset + slot.nbytes <= problem.limit_bytes(slot.tier) for slot in outer)
