"""Scene: everything that the rows of the linear program are built from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from outcore.bound.absences import Absence, best_rates, find_absences
from outcore.bound.grid import Grid, make_grid
from outcore.bound.positions import Positions, make_positions
from outcore.ir.hardware import Tier
from outcore.ir.liveness import Liveness, liveness
from outcore.ir.problem import Problem

MOST_POSITIONS = 128
"""Positions at which memory is checked. More need time and prove little more (docs/bound.md)."""

MOST_BLOCKS = 6
"""Blocks in which ops run again; the same applies."""

MOST_FRACTIONS = 8000
"""The most absences times blocks. With many absences there are fewer blocks."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A problem, prepared for the linear program.

    `of_buffer`: the indices of a buffer's absences, in order of position. Bytes are divided by
    `byte_unit` and seconds by `second_unit`, so that the largest are about 1. `away_rate` and
    `back_rate`, the rates of the links out and back, are in these units.
    """

    problem: Problem
    live: Liveness
    positions: Positions
    absences: tuple[Absence, ...]
    again_until: tuple[int | None, ...]
    grid: Grid
    of_buffer: dict[int, tuple[int, ...]]
    byte_unit: float
    second_unit: float
    away_rate: float
    back_rate: float

    def nbytes(self, number: int) -> float:
        """Bytes of an absence's buffer, in units."""
        return self.absences[number].nbytes / self.byte_unit

    @property
    def outer_bytes(self) -> float:
        """The capacity of the outer tiers, in units."""
        outer = (self.problem.limit_bytes(tier) for tier in (Tier.HOST, Tier.DISK))
        return sum(outer) / self.byte_unit


def make_scene(problem: Problem) -> Scene:
    """The scene of `problem`. Linear in ops, except for sorting."""
    live = liveness(problem.trace)
    positions = make_positions(problem, live)
    found = find_absences(problem, live, positions)
    of_buffer = defaultdict(list)
    for number, absence in enumerate(found.all):
        of_buffer[absence.buffer].append(number)
    byte_unit = float(max((a.nbytes for a in found.all), default=1))
    blocks = max(2, min(MOST_BLOCKS, MOST_FRACTIONS // max(1, len(found.all))))
    second_unit = sum(positions.seconds) or 1.0
    away, back = best_rates(problem)
    return Scene(
        problem=problem,
        live=live,
        positions=positions,
        absences=found.all,
        again_until=found.again_until,
        grid=make_grid(positions, found.all, MOST_POSITIONS, blocks),
        of_buffer={buffer: tuple(numbers) for buffer, numbers in of_buffer.items()},
        byte_unit=byte_unit,
        second_unit=second_unit,
        away_rate=away * second_unit / byte_unit,
        back_rate=back * second_unit / byte_unit,
    )
