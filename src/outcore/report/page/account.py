"""Account: what one call to a graph does, and how many such calls a step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outcore.explain import Explanation

MANY = 10
"""From this number on, a count is shown as a whole number."""


class Account(NamedTuple):
    """One graph of a step.

    `explained` is about one call to it; `often` is how many calls a step has on average.
    """

    explained: Explanation
    often: float = 1.0


def total(accounts: Sequence[Account], figure: Callable[[Explanation], float]) -> float:
    """The sum of a figure over all calls of a step."""
    return sum((each.often * figure(each.explained) for each in accounts), 0.0)


def seconds_of(accounts: Sequence[Account]) -> float:
    """The predicted time of the step."""
    return total(accounts, lambda each: each.seconds)


def stall_seconds_of(accounts: Sequence[Account]) -> float:
    """How long compute waits in the step."""
    return total(accounts, lambda each: each.stall_seconds)


def times_text(count: float) -> str:
    """A count, which may be an average: whole from `MANY` on, in two digits below it."""
    return f"{count:.0f}" if count >= MANY else f"{count:.2g}"
