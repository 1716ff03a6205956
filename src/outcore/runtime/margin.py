"""margin: the part of a budget that plans leave free, for what nobody predicts."""

from __future__ import annotations

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier

MARGIN_DIVISOR = 200
"""It is the budget over this: half a percent."""


def margin_bytes(budget_bytes: int) -> int:
    """The margin, a part of the budget."""
    return budget_bytes // MARGIN_DIVISOR


def slack_bytes(budget_bytes: int) -> int:
    """The part of the margin for calls that hold a little more than was planned for."""
    return margin_bytes(budget_bytes) // 2


def budget_for(planned_bytes: int) -> int:
    """The least budget that has `planned_bytes` beside its margin."""
    return -(-planned_bytes * MARGIN_DIVISOR // (MARGIN_DIVISOR - 1))


def for_any_budget(error: InfeasibleError, budget_bytes: int) -> None:
    """Let `error`, of a problem with the margin of `budget_bytes`, name the budget that will do.

    Which has a larger margin.
    """
    if error.tier == Tier.DEVICE.value:
        error.floor_bytes = budget_for(error.floor_bytes - margin_bytes(budget_bytes))
