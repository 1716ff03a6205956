"""policies: functions from a Problem to a Plan; each system of the papers is one of them."""

from outcore.policies.ask import ask
from outcore.policies.candidates import away, candidates, recomputable
from outcore.policies.floor import (
    Floor,
    floor,
    floor_plan,
    infeasible,
    leanest_plan,
    plan_floor,
)
from outcore.policies.lean import lean_plans
from outcore.policies.overflow import overflow, with_roomy_host
from outcore.policies.plugins import KnownPolicies, Plugin, plugins
from outcore.policies.policy import Hasty, Improver, Policy
from outcore.policies.settle import settle
from outcore.policies.spec import parse_policy, resolve, spec_text
from outcore.policies.table import POLICIES

__all__ = [
    "POLICIES",
    "Floor",
    "Hasty",
    "Improver",
    "KnownPolicies",
    "Plugin",
    "Policy",
    "ask",
    "away",
    "candidates",
    "floor",
    "floor_plan",
    "infeasible",
    "lean_plans",
    "leanest_plan",
    "overflow",
    "parse_policy",
    "plan_floor",
    "plugins",
    "recomputable",
    "resolve",
    "settle",
    "spec_text",
    "with_roomy_host",
]
