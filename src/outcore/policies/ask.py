"""ask: a policy's plan, with what all promise seen to where a policy is of another package."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.errors import OutcoreError, PolicyError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import Improver, Policy
from outcore.policies.settle import check_fits


def ask(policy: Policy, problem: Problem, known: Sequence[Plan] = ()) -> Plan:
    """The plan of `policy`; an `Improver` starts from those `known`.

    Raises what the policy raises on purpose. Of a policy that is not ours, PolicyError where it
    fails in another way or gives no plan, InfeasibleError where its plan does not fit.
    """
    ours = type(policy).__module__.startswith("outcore.")
    try:
        if known and isinstance(policy, Improver):
            plan = policy.improve(problem, known)
        else:
            plan = policy.plan(problem)
    except OutcoreError:
        raise
    except (Exception, SystemExit) as error:
        if ours:
            raise
        reason = f"its plan() raised {type(error).__name__}: {error}"
        raise PolicyError(policy=policy.name, reason=reason) from error
    if not isinstance(plan, Plan):
        reason = f"its plan() returned {type(plan).__name__}, and that is not a Plan"
        raise PolicyError(policy=policy.name, reason=reason)
    if not ours:  # which settle their plans
        check_fits(problem, plan, policy.name)
    return plan
