"""Policy: what every planner is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from outcore.errors import PolicyError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.units import format_count

MIN_BYTES = 64 * 2**10
"""Default of `min_bytes`: what is smaller is not worth a copy or a decision."""


class Policy(Protocol):
    """A way to plan. An implementation is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name it is known by: `swap-all`."""
    summary: ClassVar[str]
    """What it does, in one line."""

    def plan(self, problem: Problem) -> Plan:
        """A plan whose lowered program fits the problem's budgets. Pure and deterministic.

        Raises InfeasibleError, with the smallest budget that this policy can meet, where it has no
        plan that fits.
        """
        ...


@runtime_checkable
class Improver(Policy, Protocol):
    """A policy that can start from plans that are known."""

    def improve(self, problem: Problem, known: Sequence[Plan]) -> Plan:
        """As `plan`, and no slower than any of `known` that fits."""
        ...


@runtime_checkable
class Hasty(Policy, Protocol):
    """A policy that can do with a small part of its time: to see what fits, before it plans."""

    @property
    def in_haste(self) -> Policy:
        """The one that does. It has a plan wherever this one has."""
        ...


def check_min_bytes(policy: Policy, min_bytes: int) -> None:
    """Raise PolicyError unless `min_bytes` is at least one byte."""
    if min_bytes < 1:
        reason = (
            f"min_bytes={format_count(min_bytes)} B: it is at least 1B, which takes every buffer"
        )
        raise PolicyError(policy=policy.name, reason=reason)
