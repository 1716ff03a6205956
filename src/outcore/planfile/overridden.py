"""Overridden: a policy whose plans follow rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.plan import Choice, Gap, Plan
from outcore.ir.problem import Problem
from outcore.planfile.nouns import Rule
from outcore.planfile.overrides import forced
from outcore.policies import Policy, ask
from outcore.policies.search.fixed import search_fixed, with_fixed
from outcore.policies.search.search import Search
from outcore.policies.settle import settle


@dataclass(frozen=True, slots=True)
class Overridden:
    """`policy` under `rules`.

    The plan is the policy's, with the choices that the rules fix; if that does not fit, `search`
    plans around the rules. If the policy is `search`, it does so from the start. The plan names the
    policy that made it.
    """

    name: ClassVar[str] = "overridden"
    summary: ClassVar[str] = "a policy's plan with the choices that rules fix"

    policy: Policy
    rules: tuple[Rule, ...]

    def plan(self, problem: Problem) -> Plan:
        """The plan.

        Raises OptionValueError if a rule cannot be followed, InfeasibleError if nothing that
        follows the rules fits. The latter names the smallest budget at which something does.
        """
        fixed = forced(problem, self.rules)
        if not fixed:
            return ask(self.policy, problem)
        if isinstance(self.policy, Search):
            return _searched(problem, self.policy, fixed)
        try:
            made = ask(self.policy, problem)
            return settle(problem, with_fixed(made, fixed), self.policy, made.by_op)
        except InfeasibleError:
            return _searched(problem, Search(), fixed)


def _searched(problem: Problem, search: Search, fixed: Mapping[Gap, Choice]) -> Plan:
    try:
        return search_fixed(problem, search, fixed)
    except InfeasibleError as error:
        raise replace(error, policy=f"{error.policy} with overrides") from None
