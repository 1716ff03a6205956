"""copies: add the rows for copies: two links, one copy at a time each, and what is away."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from outcore.bound.linear import LinearProgram, Terms, times
from outcore.bound.positions import ARRIVAL
from outcore.bound.scene import Scene


@dataclass(frozen=True, slots=True)
class Copies:
    """Columns of the linear program.

    `moved`: per absence of a movable buffer, the fraction that is copied back. `away`: per grid
    index, the bytes in an outer tier that are not on the device.
    """

    moved: dict[int, int]
    away: tuple[int, ...]


def add_copies(lp: LinearProgram, scene: Scene, wait: list[int]) -> Copies:
    """Add the flows over both links.

    `wait`: per grid index, the column of the time added to it; empty if copies need no time.
    """
    moved = {n: lp.variable(1.0) for n, a in enumerate(scene.absences) if a.movable}
    if not moved:
        return Copies({}, ())
    events = _events(lp, scene, moved)
    total = sum(scene.nbytes(n) for n in moved)
    return Copies(moved, _Flows(lp, scene, wait, total).run(events))


@dataclass(frozen=True, slots=True)
class _Events:
    """Per grid index, bytes as terms.

    `made`: they exist, so that they can be copied out. `dropped`: freed without a copy, because an
    earlier one is still valid. `due`: needed on the device. `opened`, `closed`: an absence starts
    or ends at this index, if it covers any.
    """

    made: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    dropped: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    due: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    opened: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    closed: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))


def _events(lp: LinearProgram, scene: Scene, moved: dict[int, int]) -> _Events:
    events, grid = _Events(), scene.grid
    first = _first_copies(lp, scene, moved)
    for number, column in moved.items():
        absence, nbytes = scene.absences[number], scene.nbytes(number)
        events.made[_leaves(scene, absence.buffer)].append((first[number], nbytes))
        if first[number] != column:
            again = [(column, nbytes), (first[number], -nbytes)]
            events.dropped[grid.after(absence.after)] += again
        left, due = grid.after(absence.after), grid.before(absence.before)
        events.due[due].append((column, nbytes))
        if left < due:
            events.opened[left].append((column, nbytes))
            events.closed[due].append((column, nbytes))
    return events


def _leaves(scene: Scene, buffer: int) -> int:
    """The first index in which a copy out of a buffer can make progress.

    It is issued after the use before an absence, or runs in parallel with that use if the buffer
    existed before. A copy for the first absence may serve a later one, even if the buffer came back
    by a rerun in between.
    """
    producer = scene.live.producer[buffer]
    after = scene.absences[scene.of_buffer[buffer][0]].after
    made = ARRIVAL if producer is None else scene.positions.of_op[producer]
    used = scene.positions.ops[after] is not None
    return scene.grid.before(after) if used and made < after else scene.grid.after(after)


def _first_copies(lp: LinearProgram, scene: Scene, moved: dict[int, int]) -> dict[int, int]:
    """Per absence, the fraction copied out for it. A copy serves all later absences too."""
    first: dict[int, int] = {}
    for numbers in scene.of_buffer.values():
        if numbers[0] not in moved:
            continue
        if len(numbers) == 1:
            first[numbers[0]] = moved[numbers[0]]
            continue
        so_far: Terms = []
        for number in numbers:
            first[number] = lp.variable(1.0)
            lp.at_most([(first[number], 1.0), (moved[number], -1.0)])
            so_far = [(lp.sum_of([*so_far, (first[number], 1.0)], 1.0), 1.0)]
            lp.at_most([(moved[number], 1.0), *times(so_far, -1.0)])
    return first


class _Flows:
    """Walks the grid. Each index has, per link, a flow before its op and one while the op runs."""

    def __init__(self, lp: LinearProgram, scene: Scene, wait: list[int], total: float) -> None:
        self.lp, self.scene, self.wait, self.total = lp, scene, wait, total
        self.most_away = min(total, scene.outer_bytes)

    def run(self, events: _Events) -> tuple[int, ...]:
        """The columns of the bytes that are away, per grid index."""
        lp, total, scene = self.lp, self.total, self.scene
        uncopied: Terms = []
        stock: Terms = []
        early: Terms = []
        inside: Terms = []
        found = []
        for index in range(scene.grid.size + 1):
            out, back = (self._before(index, r) for r in (scene.away_rate, scene.back_rate))
            uncopied = [*uncopied, *events.made[index], (out, -1.0)]
            uncopied = [(lp.sum_of(uncopied, total), 1.0)]
            early = [*early, (back, 1.0), *times(events.due[index], -1.0)]
            early = [(lp.sum_of(early, total), 1.0)]
            if index == scene.grid.size:
                break
            out_beside, back_beside = (
                self._beside(index, r) for r in (scene.away_rate, scene.back_rate)
            )
            lp.at_most([(out_beside, 1.0), *times(uncopied, -1.0)])  # not what this op makes
            early.append((back_beside, 1.0))
            stock += [(out, 1.0), *events.dropped[index], (back, -1.0), (back_beside, -1.0)]
            stock = [(lp.sum_of(stock, total), 1.0)]
            inside = [*inside, *events.opened[index], *times(events.closed[index], -1.0)]
            inside = [(lp.sum_of(inside, total), 1.0)]
            away = lp.variable(self.most_away)
            lp.at_most([(away, 1.0), *times(stock, -1.0)])
            lp.at_most([(away, 1.0), *early, *times(inside, -1.0)])
            found.append(away)
            uncopied.append((out_beside, -1.0))
            stock.append((out_beside, 1.0))
        return tuple(found)

    def _before(self, index: int, rate: float) -> int:
        """Bytes over a link from the end of the previous grid position to the start of this one."""
        flow = self.lp.variable(self.total)
        if self.wait:
            lead = self.scene.grid.lead_seconds[index] / self.scene.second_unit
            scale = 1 / max(1.0, rate)
            terms = [(flow, scale), (self.wait[index], -rate * scale)]
            self.lp.at_most(terms, rate * scale * lead)
        return flow

    def _beside(self, index: int, rate: float) -> int:
        """Bytes over a link while the op runs."""
        seconds = self.scene.grid.run_seconds[index] / self.scene.second_unit
        return self.lp.variable(min(self.total, rate * seconds) if self.wait else self.total)
