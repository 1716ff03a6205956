"""rounds: let workers run in turns of a few steps, so that noise affects all of them alike."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol, TypeAlias, TypeVar

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.worker import Worker, WorkerError


class Turn(Protocol):
    """Some steps in a row, with whatever else is known of them."""

    @property
    def seconds(self) -> float:
        """Mean seconds of a step."""
        ...


R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U", bound=Turn)

FEWEST_ROUNDS = 3
SLOW = 4.0
"""A worker this many times slower than the first is left out after `FEWEST_ROUNDS` rounds."""

Turns: TypeAlias = tuple[U | None, ...]
"""One turn per round; None for a round that the worker sat out."""


def take_turns(
    workers: Mapping[str, Worker[T]],
    turn: Callable[[T, int], U],
    rounds: int,
    steps: int,
    patience: Patience,
    failed: dict[str, WorkerError] | None = None,
) -> dict[str, Turns[U]]:
    """Up to `rounds` rounds of one `turn` of `steps` steps each. Each round, another worker begins.

    The first worker is the reference: if it fails, so does this function. Another worker that fails
    is left out, also of the result, and its error goes into `failed`.
    """
    names = list(workers)
    reference = names[0]
    turns: dict[str, list[U | None]] = {name: [] for name in names}
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and patience.over():
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            out = number >= FEWEST_ROUNDS and _is_slow(turns[name], turns[reference])
            try:
                turns[name].append(None if out else workers[name].ask(turn, steps))
            except WorkerError as error:
                if name == reference:
                    raise
                print(f"{name}: {error}", file=sys.stderr)
                names.remove(name)
                if failed is not None:
                    failed[name] = error
    return {name: tuple(turns[name]) for name in names}


def seconds(turns: Turns[U]) -> float:
    """Median seconds of the turns taken."""
    return median(turn.seconds for turn in turns if turn is not None)


def ratio_of_medians(turns: Turns[Any], reference: Turns[Any]) -> float:
    """Median of `turns` over the median of `reference`, in the rounds that both took part in."""
    return _reduce(turns, reference, lambda mine, theirs: median(mine) / median(theirs))


def median_of_ratios(turns: Turns[Any], reference: Turns[Any]) -> float:
    """Median over the rounds of the ratio within a round."""
    return _reduce(
        turns, reference, lambda mine, theirs: median(map(float.__truediv__, mine, theirs))
    )


def spread(turns: Turns[Any], reference: Turns[Any]) -> str:
    """The quartiles of the ratio within a round."""

    def quartiles(mine: Sequence[float], theirs: Sequence[float]) -> str:
        ratios = sorted(map(float.__truediv__, mine, theirs))
        last = len(ratios) - 1
        return f"{ratios[round(last / 4)]:.3f} to {ratios[round(3 * last / 4)]:.3f}"

    return _reduce(turns, reference, quartiles)


def steps_per_turn(step_seconds: float, turn_seconds: float) -> int:
    """How many steps make a turn of about `turn_seconds`."""
    return max(1, math.ceil(turn_seconds / step_seconds))


def _is_slow(turns: Sequence[Any], reference: Sequence[Any]) -> bool:
    return seconds(tuple(turns)) > SLOW * seconds(tuple(reference))


def _reduce(
    turns: Turns[Any], reference: Turns[Any], how: Callable[[Sequence[float], Sequence[float]], R]
) -> R:
    pairs = [(a, b) for a, b in zip(turns, reference, strict=True) if a and b]
    return how([a.seconds for a, _ in pairs], [b.seconds for _, b in pairs])
