"""Policy: what every planner is, and how one is written as text."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from typing import ClassVar, Protocol

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


def options(policy: Policy | type[Policy]) -> tuple[Field[object], ...]:
    """The options of a policy, in order of declaration."""
    if not is_dataclass(policy):
        raise TypeError(f"{policy!r} is no policy: a policy is a dataclass with a name")
    return fields(policy)


def spec_text(policy: Policy) -> str:
    """The spec that `parse_policy` turns back into `policy`: `pooch{min_bytes=128KiB}`.

    Options that have their default value are left out.
    """
    given = ((f.name, getattr(policy, f.name), f.default) for f in options(policy))
    written = [
        f"{name}={_value_text(name, value)}" for name, value, usual in given if value != usual
    ]
    return f"{policy.name}{{{','.join(written)}}}" if written else policy.name


def _value_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and name.endswith("_bytes"):
        return _size_text(value)
    return repr(value) if isinstance(value, float) else str(value)


def _size_text(nbytes: int) -> str:
    """The largest binary unit that spells `nbytes` exactly."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"


def check_min_bytes(policy: Policy, min_bytes: int) -> None:
    """Raise PolicyError unless `min_bytes` is at least one byte."""
    if min_bytes < 1:
        reason = (
            f"min_bytes={format_count(min_bytes)} B: it is at least 1B, which takes every buffer"
        )
        raise PolicyError(policy=policy.name, reason=reason)
