"""overflow: adapt a plan to a machine whose host memory is too small for all that it offloads.

No paper has this third tier. The policy plans as if the room of the disk were host memory too
(`with_roomy_host`). Then what is away longest goes to the disk, until the rest fits in host memory
(`overflow`). A copy to the disk passes through host memory: the driver stages it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.memory import staging_needed, tier_bytes
from outcore.ir.plan import Choice, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower, lower_without_overlap
from outcore.policies.settle import outer_too_small


def with_roomy_host(problem: Problem) -> Problem:
    """The problem without a disk, and with a host that has the room of both."""
    host, disk = (problem.limit_bytes(tier) for tier in (Tier.HOST, Tier.DISK))
    room = host + disk
    hardware = _with_capacity(problem.hardware, {Tier.HOST: room, Tier.DISK: 0})
    return replace(problem, hardware=hardware, host_budget_bytes=room, disk_budget_bytes=0)


def overflow(problem: Problem, plan: Plan, *, overlap: bool = True) -> Plan:
    """The plan with as much of its offloads sent to the disk as the host's limit requires.

    What leaves first goes to the disk: it comes back last, so a slow disk has the most time. A
    large buffer goes there only if the smaller ones are not enough, because the staging buffers on
    the host have the size of the largest buffer on the disk. Lowers the plan once for each distinct
    size up to that one, and about log2(n) times for n buffers. `overlap`: whether it is to run with
    overlap; without, copies may lie in an outer tier longer. Raises InfeasibleError if a tier is
    too small.
    """
    sizes = [buffer.nbytes for buffer in problem.trace.buffers]
    away = [gap for gap, choice in plan.choices if isinstance(choice, Offload)]
    order = list(dict.fromkeys(g.buffer for g in sorted(away, key=lambda g: (g.after, g.buffer))))

    lowered = partial(lower, fast=True) if overlap else lower_without_overlap

    def taken(found: Plan, tier: Tier) -> int:
        """Bytes of `tier` that `found` needs."""
        return tier_bytes(problem, lowered(problem, found), tier)

    def over(moved: Sequence[int]) -> int:
        """Bytes of host memory beyond its limit with the buffers `moved` on the disk."""
        found = _moved(plan, moved)
        staging = staging_needed(problem.trace, found)
        return taken(found, Tier.HOST) + staging - problem.limit_bytes(Tier.HOST)

    least = over(())
    chosen: Sequence[int] = ()
    for largest in sorted({sizes[buffer] for buffer in order}) if least > 0 else ():
        small = [buffer for buffer in order if sizes[buffer] <= largest]
        excess = over(small)
        least = min(least, excess)
        if excess <= 0:
            chosen = _fewest(small, over)
            break
    if least > 0:
        raise outer_too_small(problem, Tier.HOST, least, plan.policy)
    found = _moved(plan, chosen)
    excess = taken(found, Tier.DISK) - problem.limit_bytes(Tier.DISK)
    if excess > 0:
        raise outer_too_small(problem, Tier.DISK, excess, plan.policy)
    return replace(found, problem_digest=digest(problem), trace_digest=digest(problem.trace))


def _fewest(order: Sequence[int], over: Callable[[Sequence[int]], int]) -> Sequence[int]:
    """A short prefix of `order` that is not over; the shortest if all sizes are equal.

    All of `order` must not be over. `over` returns the bytes beyond the limit.
    """
    low, high = 1, len(order)
    while low < high:
        middle = (low + high) // 2
        if over(order[:middle]) > 0:
            low = middle + 1
        else:
            high = middle
    return order[:high]


def _moved(plan: Plan, buffers: Sequence[int]) -> Plan:
    """`plan` with the offloads of `buffers` sent to the disk."""
    chosen = set(buffers)

    def choice(gap: Gap, before: Choice) -> Choice:
        if isinstance(before, Offload) and gap.buffer in chosen:
            return replace(before, tier=Tier.DISK)
        return before

    choices = {gap: choice(gap, before) for gap, before in plan.choices}
    return make_plan(choices, plan.policy, variants=plan.by_op)


def _with_capacity(hardware: Hardware, given: dict[Tier, int]) -> Hardware:
    """`hardware` with the capacities in `given`."""
    capacity = tuple((tier, given.get(tier, nbytes)) for tier, nbytes in hardware.capacity_bytes)
    return replace(hardware, capacity_bytes=capacity)
