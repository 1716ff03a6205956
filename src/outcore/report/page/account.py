"""Account: what one call of a graph does, and how many of them a step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outcore.explain import Explanation

MANY = 10
"""From here on a number of times is told as a whole one."""


class Account(NamedTuple):
    """A graph of a step: one call of it `explained`; a step has it so `often`, on average."""

    explained: Explanation
    often: float = 1.0


def total(accounts: Sequence[Account], figure: Callable[[Explanation], float]) -> float:
    """The sum of a figure over the calls of a step."""
    return sum((each.often * figure(each.explained) for each in accounts), 0.0)


def seconds_of(accounts: Sequence[Account]) -> float:
    """The predicted step."""
    return total(accounts, lambda each: each.seconds)


def stall_seconds_of(accounts: Sequence[Account]) -> float:
    """How long compute waits in it."""
    return total(accounts, lambda each: each.stall_seconds)


def times_text(count: float) -> str:
    """How many times, on average: in two digits where they are few."""
    return f"{count:.0f}" if count >= MANY else f"{count:.2g}"
