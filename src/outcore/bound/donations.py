"""Donations: the memory that an op saves by writing a result over an argument."""

from __future__ import annotations

from collections import defaultdict

from outcore.bound.linear import LinearProgram, Terms, times
from outcore.bound.scene import Scene


class Donations:
    """What can be saved at each position. Linear in the trace's donations.

    An argument that is read again later can only be overwritten if it leaves at that position.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sure: dict[int, int] = defaultdict(int)
        """Position -> bytes saved whatever is away; an upper limit: two results may share one."""
        self.given: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        """Position -> per result, its bytes and the absences that begin here: one must be used."""
        begins = {(a.buffer, a.after): n for n, a in enumerate(scene.absences) if a.needed}
        for (position, target), sources in self._pairs().items():
            sizes = [scene.problem.trace.buffers[b].nbytes for b in (target, *sources)]
            saved = min(sizes[0], max(sizes[1:]))
            later = [(source, position) for source in sources]
            if all(key in begins for key in later):
                self.given[position].append((saved, [begins[key] for key in later]))
            else:
                self.sure[position] += saved

    def _pairs(self) -> dict[tuple[int, int], list[int]]:
        """(position, result) -> the arguments that it may be written over, without held ones."""
        scene, trace = self.scene, self.scene.problem.trace
        sources: dict[tuple[int, int], list[int]] = defaultdict(list)
        for donation in trace.donations:
            source = trace.values[donation.source].buffer
            if not scene.live.held[source]:
                target = trace.values[donation.target].buffer
                sources[scene.positions.of_op[donation.op], target].append(source)
        return sources

    def least_bytes(self, position: int) -> int:
        """The fewest bytes at `position`, before what `terms` saves."""
        return self.scene.positions.fixed_bytes[position] - self.sure.get(position, 0)

    def smallest_bytes(self, position: int) -> int:
        """The fewest bytes at `position`, if everything that can be saved is saved."""
        return self.least_bytes(position) - sum(n for n, _ in self.given.get(position, ()))

    def terms(
        self,
        lp: LinearProgram,
        moved: dict[int, int],
        freed: dict[tuple[int, int], Terms],
        position: int,
    ) -> Terms:
        """What is saved at `position` if arguments leave, in byte units."""
        found: Terms = []
        for nbytes, numbers in self.given.get(position, ()):
            saved = lp.variable(nbytes / self.scene.byte_unit)
            for_all: Terms = [(saved, 1.0)]
            for number in numbers:
                block, _ = self.scene.grid.blocks_of(self.scene.absences[number])
                ways = list(freed.get((number, block), []))
                if number in moved:
                    ways.append((moved[number], 1.0))
                for_all += times(ways, -self.scene.nbytes(number))
            lp.at_most(for_all)
            found.append((saved, 1.0))
        return found
