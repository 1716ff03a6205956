"""reruns: add the rows for recomputation: what runs again, the time it needs, and what it frees."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from outcore.bound.linear import LinearProgram, Terms, times
from outcore.bound.scene import Scene


@dataclass(frozen=True, slots=True)
class Reruns:
    """Columns of the linear program, by (op, block) or (absence, block).

    `runs`: the fraction of the op that runs again in the block; `later`: in this block or a later
    one. `absent`: the fraction that is away when the block begins, and not copied back. `freed`: a
    sum of at least the fraction that is away in this way at any time in the block.
    """

    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    later: dict[tuple[int, int], int] = field(default_factory=dict)
    absent: dict[tuple[int, int], int] = field(default_factory=dict)
    freed: dict[tuple[int, int], Terms] = field(default_factory=dict)


def add_reruns(lp: LinearProgram, scene: Scene, wait: list[int]) -> Reruns:
    """Add the fractions, their time, and what they read. `wait`: as for copies."""
    found = Reruns()
    _add_runs(lp, scene, found)
    for number in range(len(scene.absences)):
        _add_absence(lp, scene, found, number)
    _add_reads(lp, scene, found)
    if wait:
        _add_time(lp, scene, wait, found)
    return found


def _add_runs(lp: LinearProgram, scene: Scene, found: Reruns) -> None:
    grid = scene.grid
    for op, until in enumerate(scene.again_until):
        if until is None:
            continue
        after: Terms = []
        start = grid.block[grid.after(scene.positions.of_op[op])]
        for block in range(grid.block[grid.before(until)], start - 1, -1):
            found.runs[op, block] = run = lp.variable(1.0)
            found.later[op, block] = later = lp.variable(1.0)
            lp.at_most([(later, 1.0), *after, (run, -1.0)])
            for column in (run, *(c for c, _ in after)):
                lp.at_most([(column, 1.0), (later, -1.0)])
            after = [(later, -1.0)]


def _add_absence(lp: LinearProgram, scene: Scene, found: Reruns, number: int) -> None:
    """What is away in a block is still away when it ends, or its producer runs again in it."""
    absence = scene.absences[number]
    producer = absence.producer
    if producer is None and absence.needed:
        return
    first, last = scene.grid.blocks_of(absence)
    for block in range(first + 1, last + 1):
        found.absent[number, block] = column = lp.variable(1.0)
        if producer is not None and absence.needed:
            lp.at_most([(column, 1.0), (found.later[producer, block], -1.0)])
    for block in range(first, last + absence.needed):
        freed = [(found.absent[number, block + 1], 1.0)] if block < last else []
        if producer is not None:
            freed.append((found.runs[producer, block], 1.0))
        found.freed[number, block] = freed
        if block > first:
            lp.at_most([(found.absent[number, block], 1.0), *times(freed, -1.0)])


def _add_reads(lp: LinearProgram, scene: Scene, found: Reruns) -> None:
    """What runs again in this block or later needs what it reads.

    If that is away when the block begins, and is not copied back, it is recomputed too. A buffer
    that no op needs any more is followed up to the last rerun of a forward op that reads it.
    """
    ops, boundary = len(scene.again_until), scene.problem.trace.boundary
    readers: dict[int, list[int]] = defaultdict(list)
    for op, until in enumerate(scene.again_until):
        if until is not None:
            for buffer in scene.problem.trace.reads[op]:
                readers[buffer].append(op)
    for (number, block), absent in found.absent.items():
        producer = scene.absences[number].producer
        back = [(found.later[producer, block], -1.0)] if producer is not None else []
        asked = ops if scene.absences[number].needed else boundary
        for op in readers[scene.absences[number].buffer]:
            if op < asked and (op, block) in found.later:
                lp.at_most([(found.later[op, block], 1.0), (absent, 1.0), *back], 1.0)


def _add_time(lp: LinearProgram, scene: Scene, wait: list[int], found: Reruns) -> None:
    """Each block has time for what runs again in it."""
    positions = scene.positions
    rows: list[Terms] = [[] for _ in range(scene.grid.blocks)]
    for index, column in enumerate(wait):
        rows[scene.grid.block[index]].append((column, -1.0))
    for (op, block), column in found.runs.items():
        rows[block].append((column, positions.seconds[positions.of_op[op]] / scene.second_unit))
    for row in rows:
        lp.at_most(row)
