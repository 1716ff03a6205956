"""Workspaces: which variant each op runs as, in policies that choose.

Nothing of a workspace is left after its op, so the ops do not compete: each goes by the memory that
is free while it runs, and the order in which they are asked does not matter.
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
    """The least workspace; of those the fastest."""
    PERFORMANCE = "performance"
    """The fastest; of those the one with the least workspace."""


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

    There is one wherever the choices fit with the least workspaces. Raises InfeasibleError where
    they do not, with the smallest budget that they can meet so.
    """
    lean = settle_as(problem, choices, policy, Algorithms.MEMORY)
    if not problem.profile.alternatives:
        return lean
    chosen = make_plan({}, variants=fastest_in_room(problem, lean)).variants
    fast = replace(lean, variants=chosen)
    # The device has room for it, but copies wait for other ops, and their room below with them.
    return fast if fits(problem, lower(problem, fast, fast=True)) else lean


def fastest_in_room(problem: Problem, plan: Plan) -> dict[int, int]:
    """Op -> its fastest variant whose workspace fits beside what `plan` holds at every run of it.

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
    """Op -> the most workspace that there is room for at each of its runs."""
    program = lower(problem, plan, fast=True)
    # What is held between the two calls is gone by the first run of the second.
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
    return cost.seconds, cost.workspace_bytes


def _leanest(cost: Cost) -> tuple[int, float]:
    return cost.workspace_bytes, cost.seconds
