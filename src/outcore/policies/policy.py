"""policy: Policy, the interface of every planner, and what a planner may offer in addition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from outcore.errors import PolicyError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.units import format_count

MIN_BYTES = 64 * 2**10
"""Default of `min_bytes`: smaller buffers are not worth a copy or a decision."""


class Policy(Protocol):
    """A way to plan. An implementation is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name in specs, such as `swap-all`."""
    summary: ClassVar[str]
    """What it does, in one line."""

    def plan(self, problem: Problem) -> Plan:
        """A plan whose lowered program fits the problem's budgets. Pure and deterministic.

        Raises InfeasibleError, with the smallest budget that this policy can meet, if it has no
        plan that fits.
        """
        ...


@runtime_checkable
class Improver(Policy, Protocol):
    """A policy that can start from known plans."""

    def improve(self, problem: Problem, known: Sequence[Plan]) -> Plan:
        """A plan as `plan` returns it, and no slower than any of `known` that fits."""
        ...


@runtime_checkable
class Hasty(Policy, Protocol):
    """A policy with a fast version, used to find out what fits before the real planning."""

    @property
    def in_haste(self) -> Policy:
        """The fast version. It has a plan whenever this policy has one."""
        ...


def check_min_bytes(policy: Policy, min_bytes: int) -> None:
    """Raise PolicyError unless `min_bytes` is at least one byte."""
    if min_bytes < 1:
        reason = (
            f"min_bytes={format_count(min_bytes)} B: it is at least 1B, which takes every buffer"
        )
        raise PolicyError(policy=policy.name, reason=reason)
