"""overflow: a plan for a machine whose host has too little memory for what leaves the device.

No paper has this third tier. The policy plans as if the host had the disk's room too; then what is
away for longest goes to the disk, until the rest fits in the host. A copy to the disk passes
through host memory: the driver stages it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outcore.ir.hardware import STAGING_BUFFERS, Hardware, Tier
from outcore.ir.memory import tier_bytes
from outcore.ir.plan import Choice, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.policies.settle import outer_too_small

MakePlan = Callable[[Problem], Plan]


def plan_with_overflow(problem: Problem, make: MakePlan) -> Plan:
    """The plan of `make` with host and disk as its outer tiers; `problem` has links to both.

    Raises InfeasibleError as `make` does, or where the disk has too little room as well.
    """
    return overflow(problem, make(with_roomy_host(problem)))


def with_roomy_host(problem: Problem) -> Problem:
    """The problem with no disk, and a host that has the room of both."""
    host, disk = (problem.limit_bytes(tier) for tier in (Tier.HOST, Tier.DISK))
    room = host + disk
    hardware = _with_capacity(problem.hardware, {Tier.HOST: room, Tier.DISK: 0})
    return replace(problem, hardware=hardware, host_budget_bytes=room, disk_budget_bytes=0)


def overflow(problem: Problem, plan: Plan) -> Plan:
    """The plan with as much of what it offloads sent to the disk as the host's limit asks for.

    What goes is what leaves first: it comes back last, so that a slow disk has the most time.
    Lowers the plan about log2(n) times for n buffers. Raises InfeasibleError where a tier is too
    small.
    """
    away = [gap for gap, choice in plan.choices if isinstance(choice, Offload)]
    order = list(dict.fromkeys(g.buffer for g in sorted(away, key=lambda g: (g.after, g.buffer))))

    def moved(count: int) -> Plan:
        return _moved(problem, plan, order[:count])

    high = 0 if _host_excess(problem, moved(0)) <= 0 else len(order)
    low = min(1, high)  # one that goes costs the host the buffers that it passes through
    while low < high:
        middle = (low + high) // 2
        if _host_excess(problem, moved(middle)) > 0:
            low = middle + 1
        else:
            high = middle
    found = moved(low)
    for tier, over in (
        (Tier.HOST, _host_excess(problem, found)),
        (Tier.DISK, _taken(problem, found, Tier.DISK) - problem.limit_bytes(Tier.DISK)),
    ):
        if over > 0:
            raise outer_too_small(problem, tier, over, plan.policy)
    return found


def _moved(problem: Problem, plan: Plan, buffers: Sequence[int]) -> Plan:
    chosen = set(buffers)

    def choice(gap: Gap, before: Choice) -> Choice:
        if isinstance(before, Offload) and gap.buffer in chosen:
            return replace(before, tier=Tier.DISK)
        return before

    choices = {gap: choice(gap, before) for gap, before in plan.choices}
    return make_plan(choices, plan.policy, digest(problem), digest(problem.trace))


def _host_excess(problem: Problem, plan: Plan) -> int:
    """Bytes of the host beyond its limit, with the buffers that copies to the disk pass through."""
    trace = problem.trace
    through = [
        trace.buffers[gap.buffer].nbytes
        for gap, choice in plan.choices
        if isinstance(choice, Offload) and choice.tier is Tier.DISK
    ]
    staging = STAGING_BUFFERS * max(through, default=0)
    return _taken(problem, plan, Tier.HOST) + staging - problem.limit_bytes(Tier.HOST)


def _taken(problem: Problem, plan: Plan, tier: Tier) -> int:
    return tier_bytes(problem, lower(problem, plan, fast=True), tier)


def _with_capacity(hardware: Hardware, given: dict[Tier, int]) -> Hardware:
    capacity = tuple((tier, given.get(tier, nbytes)) for tier, nbytes in hardware.capacity_bytes)
    return replace(hardware, capacity_bytes=capacity)
