"""workspaces: choose the variant that each op runs as.

Nothing of a workspace is left after its op, so ops do not compete. Each one depends on the memory
that is free while it runs, and the order in which variants are chosen does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, held_bytes
from outcore.ir.plan import Choice, Gap, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile
from outcore.ir.program import Run
from outcore.lower import lower
from outcore.policies.policy import Policy
from outcore.policies.settle import settle


class Algorithms(StrEnum):
    """One rule for all ops that have variants (vDNN, section III-C)."""

    MEMORY = "memory"
    """The least workspace; among equals the fastest."""
    PERFORMANCE = "performance"
    """The fastest; among equals the one with the least workspace."""


def variants_of(profile: Profile, algorithms: Algorithms) -> dict[int, int]:
    """Op -> its variant by the rule, for the ops that have alternatives."""
    rank = _leanest if algorithms is Algorithms.MEMORY else _fastest
    ranks = {op: [rank(cost) for cost in profile.costs[op]] for op, _ in profile.alternatives}
    return {op: ranked.index(min(ranked)) for op, ranked in ranks.items()}


def settle_as(
    problem: Problem, choices: Mapping[Gap, Choice], policy: Policy, algorithms: Algorithms
) -> Plan:
    """The plan of `choices` with all ops by one rule. Raises InfeasibleError as `settle`."""
    return settle(problem, choices, policy, variants_of(problem.profile, algorithms))


def settle_in_room(problem: Problem, choices: Mapping[Gap, Choice], policy: Policy) -> Plan:
    """The plan of `choices`, with each op the fastest that the memory they leave has room for.

    There is a plan whenever the choices fit with the least workspaces. Otherwise raises
    InfeasibleError, with the smallest budget at which they fit that way.
    """
    lean = settle_as(problem, choices, policy, Algorithms.MEMORY)
    if not problem.profile.alternatives:
        return lean
    chosen = make_plan({}, variants=fastest_in_room(problem, lean)).variants
    fast = replace(lean, variants=chosen)
    # The device has room for it. But copies then wait for other ops, and free their room in the
    # outer tiers at other times.
    return fast if fits(problem, lower(problem, fast, fast=True)) else lean


def fastest_in_room(problem: Problem, plan: Plan) -> dict[int, int]:
    """Op -> its fastest variant whose workspace fits, with what `plan` holds, at every run.

    `plan` fits the budget. Linear in the runs of its program, which is lowered once.
    """
    profile, rooms = problem.profile, _rooms(problem, plan)
    found = {}
    for op, _ in profile.alternatives:
        costs = enumerate(profile.costs[op])
        fitting = [(_fastest(c), variant) for variant, c in costs if c.workspace_bytes <= rooms[op]]
        _, found[op] = min(fitting)
    return found


def _rooms(problem: Problem, plan: Plan) -> dict[int, int]:
    """Op -> the largest workspace that there is room for at each of its runs."""
    program = lower(problem, plan, fast=True)
    # What is held between the two calls is gone by the first run of the backward call.
    held = held_bytes(replace(problem, between_bytes=0), program, Tier.DEVICE)
    rooms: dict[int, int] = {}
    for instruction, nbytes in zip(program.body, held, strict=True):
        run = instruction.action
        if isinstance(run, Run):
            others = nbytes - problem.profile.cost(run.op, run.variant).workspace_bytes
            room = problem.budget_bytes - others
            rooms[run.op] = min(room, rooms.get(run.op, room))
    return rooms


def _fastest(cost: Cost) -> tuple[float, int]:
    """Key to sort variants by time, then by workspace."""
    return cost.seconds, cost.workspace_bytes


def _leanest(cost: Cost) -> tuple[int, float]:
    """Key to sort variants by workspace, then by time."""
    return cost.workspace_bytes, cost.seconds
