"""Interleaving: workers take turns step by step, so that noise hits all alike."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeAlias, TypeVar

from benchmarks.cpu.benchmark import Patience
from benchmarks.cpu.trainer import Trainer, Turn
from benchmarks.cpu.worker import Worker, WorkerError

R = TypeVar("R")

FEWEST_ROUNDS = 3
SLOW = 4.0
"""A worker this many times slower than the first sits out the rounds after the fewest."""

Turns: TypeAlias = tuple[Turn | None, ...]
"""One per round; None where the worker sat out."""


def take_turns(
    workers: Mapping[str, Worker[Trainer]], rounds: int, steps: int, patience: Patience
) -> dict[str, Turns]:
    """Up to `rounds` rounds of one turn each; who begins changes from round to round.

    The first worker is the reference. One that fails is left out, of the answer too.
    """
    names = list(workers)
    reference = names[0]
    turns: dict[str, list[Turn | None]] = {name: [] for name in names}
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and patience.over():
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            out = number >= FEWEST_ROUNDS and _is_slow(turns[name], turns[reference])
            try:
                turns[name].append(None if out else workers[name].ask(Trainer.turn, steps))
            except WorkerError as error:
                if name == reference:
                    raise
                print(f"{name}: {error}", file=sys.stderr)
                names.remove(name)
    return {name: tuple(turns[name]) for name in names}


def seconds(turns: Turns) -> float:
    """Median of the turns taken."""
    return median(turn.seconds for turn in turns if turn is not None)


def ratio_of_medians(turns: Turns, reference: Turns) -> float:
    """Median of `turns` over that of `reference`, in the rounds that both took part in."""
    return _reduce(turns, reference, lambda mine, theirs: median(mine) / median(theirs))


def median_of_ratios(turns: Turns, reference: Turns) -> float:
    """Median over the rounds of the ratio within a round."""
    return _reduce(
        turns, reference, lambda mine, theirs: median(map(float.__truediv__, mine, theirs))
    )


def spread(turns: Turns, reference: Turns) -> str:
    """The quartiles of the ratio within a round."""

    def quartiles(mine: Sequence[float], theirs: Sequence[float]) -> str:
        ratios = sorted(map(float.__truediv__, mine, theirs))
        last = len(ratios) - 1
        return f"{ratios[round(last / 4)]:.3f} to {ratios[round(3 * last / 4)]:.3f}"

    return _reduce(turns, reference, quartiles)


def steps_per_turn(step_seconds: float, turn_seconds: float) -> int:
    """So many that a turn takes about `turn_seconds`."""
    return max(1, math.ceil(turn_seconds / step_seconds))


def _is_slow(turns: Sequence[Turn | None], reference: Sequence[Turn | None]) -> bool:
    return seconds(tuple(turns)) > SLOW * seconds(tuple(reference))


def _reduce(
    turns: Turns, reference: Turns, how: Callable[[Sequence[float], Sequence[float]], R]
) -> R:
    pairs = [(a, b) for a, b in zip(turns, reference, strict=True) if a and b]
    return how([a.seconds for a, _ in pairs], [b.seconds for _, b in pairs])
