"""margin: the part of a budget that plans leave free for what cannot be predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier

MARGIN_DIVISOR = 200
"""The margin is the budget divided by this: half a percent."""


def margin_bytes(budget_bytes: int) -> int:
    """The margin of a budget; it is a part of that budget."""
    return budget_bytes // MARGIN_DIVISOR


def slack_bytes(budget_bytes: int) -> int:
    """The half of the margin that is for calls that hold a little more than was planned for."""
    return margin_bytes(budget_bytes) // 2


def budget_for(planned_bytes: int) -> int:
    """The smallest budget, to within a byte, with room for `planned_bytes` and its own margin."""
    return -(-planned_bytes * MARGIN_DIVISOR // (MARGIN_DIVISOR - 1))


def for_any_budget(error: InfeasibleError, budget_bytes: int) -> None:
    """Make `error` name the smallest budget that works, with that budget's own margin.

    The floor in `error` was found with the margin of `budget_bytes`; a larger budget has a larger
    margin.
    """
    if error.tier == Tier.DEVICE.value:
        error.floor_bytes = budget_for(error.floor_bytes - margin_bytes(budget_bytes))


@contextmanager
def naming_any_budget(budget_bytes: int) -> Iterator[None]:
    """Apply `for_any_budget` to an InfeasibleError that is raised inside."""
    try:
        yield
    except InfeasibleError as error:
        for_any_budget(error, budget_bytes)
        raise
