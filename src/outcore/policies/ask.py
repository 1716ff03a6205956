"""ask: get a policy's plan, and check it if the policy comes from another package."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.errors import OutcoreError, PolicyError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import Improver, Policy
from outcore.policies.settle import check_fits


def ask(policy: Policy, problem: Problem, known: Sequence[Plan] = ()) -> Plan:
    """Return the plan of `policy`; an `Improver` starts from the `known` plans.

    Passes on every OutcoreError that the policy raises. For a policy of another package, raises
    PolicyError if it raises anything else, and InfeasibleError if its plan does not fit. Raises
    PolicyError if a policy does not return a Plan.
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
    if not ours:  # outcore's own policies have checked this already (`settle`)
        check_fits(problem, plan, policy.name)
    return plan
