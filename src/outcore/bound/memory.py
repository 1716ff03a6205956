"""memory: add the rows for memory: at each grid position, enough is away."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from outcore.bound.copies import Copies
from outcore.bound.donations import Donations
from outcore.bound.linear import LinearProgram, Terms, times
from outcore.bound.reruns import Reruns
from outcore.bound.scene import Scene


def add_memory(
    lp: LinearProgram, scene: Scene, copies: Copies, reruns: Reruns, excess: Terms
) -> dict[int, int]:
    """Add a row for each grid position whose op does not fit next to everything else.

    `excess`: the bytes above the budget, if these are allowed. Returns the position of each row.
    """
    donations = Donations(scene)
    change = [0] * (scene.grid.size + 1)
    for absence in scene.absences:
        covered = scene.grid.covered(absence)
        change[covered.start] += absence.nbytes
        change[covered.stop] -= absence.nbytes
    away = _Away(lp, scene, copies, reruns)
    rows = {}
    for index, others in enumerate(accumulate(change[:-1])):
        position = scene.grid.at[index]
        away.advance(index)
        above = others + donations.least_bytes(position) - scene.problem.budget_bytes
        if above > 0:
            room = [*away.terms(index), *excess]
            room += donations.terms(lp, copies.moved, reruns.freed, position)
            rows[lp.at_most(times(room, -1.0), -above / scene.byte_unit)] = position
    return rows


class _Away:
    """Sums over the absences that cover a grid index, updated from one index to the next."""

    def __init__(self, lp: LinearProgram, scene: Scene, copies: Copies, reruns: Reruns) -> None:
        self.lp, self.scene, self.copies, self.reruns = lp, scene, copies, reruns
        self.opened: dict[int, list[int]] = defaultdict(list)
        self.closed: dict[int, list[int]] = defaultdict(list)
        for number, absence in enumerate(scene.absences):
            covered = scene.grid.covered(absence)
            if covered:
                self.opened[covered.start].append(number)
                self.closed[covered.stop].append(number)
        self.inside: dict[int, None] = {}
        """The absences that cover the index, in order of their start."""
        self.total = sum(map(scene.nbytes, range(len(scene.absences))))
        self.either: dict[tuple[int, int], int] = {}
        self.sums: tuple[Terms, Terms] | None = None
        """Bytes away to be recomputed, and bytes away in any way: columns of an earlier index in
        the block, and the changes since. None if the block has none yet."""

    def advance(self, index: int) -> None:
        """Move on to `index`, the next one."""
        block = self.scene.grid.block[index]
        if index and self.scene.grid.ends_block(index - 1):
            self.sums = None
        for number in self.closed[index]:
            del self.inside[number]
            self._change(number, block, -1.0)
        for number in self.opened[index]:
            self.inside[number] = None
            self._change(number, block, 1.0)

    def _change(self, number: int, block: int, sign: float) -> None:
        if self.sums is not None:
            nbytes = sign * self.scene.nbytes(number)
            again = self.reruns.freed.get((number, block), [])
            self.sums[0].extend(times(again, nbytes))
            self.sums[1].extend(times(self._at_all(number, block, again), nbytes))

    def _at_all(self, number: int, block: int, again: Terms) -> Terms:
        """A sum of at least the fraction that is away in any way, at any time in the block."""
        moved = self.copies.moved.get(number)
        ways = again if moved is None else [*again, (moved, 1.0)]
        if len(ways) < 2:  # noqa: PLR2004 - a single fraction is at most 1
            return ways
        if (number, block) not in self.either:
            self.either[number, block] = column = self.lp.variable(1.0)
            self.lp.at_most([(column, 1.0), *times(ways, -1.0)])
        return [(self.either[number, block], 1.0)]

    def terms(self, index: int) -> Terms:
        """The most bytes that are away at `index`, as terms."""
        lp, block = self.lp, self.scene.grid.block[index]
        if self.sums is None:
            self.sums = [], []
            for number in self.inside:
                self._change(number, block, 1.0)
        again, at_all = (lp.sum_of(terms, 2 * self.total) for terms in self.sums)
        self.sums = [(again, 1.0)], [(at_all, 1.0)]
        dropped = lp.variable(self.total)
        lp.at_most([(dropped, 1.0), (again, -1.0)])
        if self.scene.grid.ends_block(index):
            lp.at_most([(dropped, 1.0), *times(self._at_end(block), -1.0)])
        moved = [(self.copies.away[index], 1.0)] if self.copies.away else []
        lp.at_most([(dropped, 1.0), *moved, (at_all, -1.0)])
        return [(dropped, 1.0), *moved]

    def _at_end(self, block: int) -> Terms:
        """What is away during a block's last op is still away when the next block begins."""
        columns = ((n, self.reruns.absent.get((n, block + 1))) for n in self.inside)
        return [(c, self.scene.nbytes(n)) for n, c in columns if c is not None]
