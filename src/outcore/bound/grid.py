"""Grid: the positions at which memory is checked, and the blocks in which ops run again.

Between two grid positions time passes and copies proceed, but memory is not checked. This is a
relaxation that limits the size of the linear program. The grid depends on neither the budget nor
the links, so the bound is monotone in both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from outcore.bound.absences import Absence
from outcore.bound.positions import Positions


@dataclass(frozen=True, slots=True)
class Grid:
    """`at`: the grid positions, ascending. The other fields are per index.

    Index i lasts from the end of position `at[i - 1]` to the end of `at[i]`: first `lead_seconds`
    of the ops between the two, then `run_seconds` of the op at `at[i]`. One more index, without a
    position, reaches to the end of the step. `block`: the block that the index is in.
    """

    at: tuple[int, ...]
    lead_seconds: tuple[float, ...]
    run_seconds: tuple[float, ...]
    block: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of grid positions, which is also the index that reaches to the end."""
        return len(self.at)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.block[-1] + 1

    def after(self, position: int) -> int:
        """The first index in which something that waits for the end of `position` can happen."""
        return bisect_right(self.at, position)

    def before(self, position: int) -> int:
        """The last index in which something that `position` waits for can happen."""
        return bisect_left(self.at, position)

    def covered(self, absence: Absence) -> range:
        """The indices at which the buffer occupies memory unless it is away.

        What only reruns still read counts up to the block of the last of them.
        """
        start, stop = self.after(absence.after), self.before(absence.before)
        if not absence.needed:
            stop = min(stop, self.block.index(self.block[stop]))
        return range(start, max(start, stop))

    def blocks_of(self, absence: Absence) -> tuple[int, int]:
        """The blocks in which the absence begins and ends."""
        return self.block[self.after(absence.after)], self.block[self.before(absence.before)]

    def ends_block(self, index: int) -> bool:
        """Whether a block ends with the op of `index`."""
        return self.block[index] != self.block[index + 1]


def make_grid(
    positions: Positions, absences: Iterable[Absence], most_positions: int, most_blocks: int
) -> Grid:
    """A grid at positions that hold much memory.

    It has at most `most_positions` and the pause, and `most_blocks`, but at least one block before
    the pause and one after it.
    """
    held = _held_bytes(positions, absences)
    pause, end = positions.pause, positions.end
    at = (
        *_split(held, range(1, pause), most_positions // 2),
        *((pause,) if pause < end else ()),
        *_split(held, range(pause + 1, end), most_positions // 2),
    )
    passed = (0.0, *accumulate(positions.seconds))
    starts, stops = (0, *(q + 1 for q in at)), (*at, end)
    lead = tuple(passed[b] - passed[a] for a, b in zip(starts, stops, strict=True))
    runs = tuple(positions.seconds[q] for q in at)
    fixed = [positions.fixed_bytes[q] for q in at]
    return Grid(at, lead, runs, _blocks(fixed, bisect_right(at, pause), most_blocks))


def _held_bytes(positions: Positions, absences: Iterable[Absence]) -> list[int]:
    """Bytes at each position if nothing that is needed again is ever away."""
    change = [0] * (positions.end + 1)
    for absence in absences:
        if absence.needed:
            change[absence.after + 1] += absence.nbytes
            change[absence.before] -= absence.nbytes
    return [a + b for a, b in zip(positions.fixed_bytes, accumulate(change[:-1]), strict=True)]


def _split(figures: Sequence[int], span: range, most: int) -> list[int]:
    """At most `most` numbers of `span`: the one with the largest figure in each of equal parts."""
    parts = min(len(span), most)
    edges = [span.start + len(span) * part // parts for part in range(parts + 1)] if parts else []
    return [max(range(a, b), key=figures.__getitem__) for a, b in pairwise(edges)]


def _blocks(fixed: Sequence[int], crossing: int, most: int) -> tuple[int, ...]:
    """The block of each index: one up to the pause, then equal ones that end where most is needed.

    `crossing`: the first index after the pause.
    """
    ends = [crossing - 1] if crossing else []
    ends += _split(fixed, range(crossing, len(fixed)), max(1, most - len(ends)))
    last = max(0, len(ends) - 1)
    return tuple(bisect_left(ends, index, hi=last) for index in range(len(fixed) + 1))
