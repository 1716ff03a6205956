"""caution: have `search` plan for slower links than were measured (docs/decisions/0040)."""

from __future__ import annotations

from dataclasses import replace

from outcore.ir.memory import fits
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.lower import lower
from outcore.out_of_process import plan_out_of_process
from outcore.planfile import Overridden
from outcore.policies import Policy
from outcore.policies.defragment import Defragment
from outcore.policies.search import Search

CAUTION = 0.05
"""Links count as slower than measured by this fraction."""


def plan_cautiously(policy: Policy, problem: Problem) -> Plan:
    """The plan of `policy` for a problem that was measured on this machine.

    If the policy is `search`, the plan is for slower links. A program frees memory by the clock of
    its links, so the plan may not fit at the measured rates. Then `search` plans for those. Raises
    as `plan_out_of_process`.
    """
    inner = policy.policy if isinstance(policy, Overridden) else policy
    if isinstance(inner, Search | Defragment):
        slower = replace(problem, hardware=problem.hardware.with_slower_links(CAUTION))
        plan = plan_out_of_process(policy, slower)
        if fits(problem, lower(problem, plan, fast=True)):
            return replace(plan, problem_digest=digest(problem))
    return plan_out_of_process(policy, problem)
