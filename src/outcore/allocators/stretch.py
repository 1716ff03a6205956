"""stretch: free memory that is held in pieces, so that requests get their places.

The smallest free block that has the room gets a request. So all that is free of a stretch is held
but for what an op is about to ask for: a block just as large, where it is to lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outcore.allocators.best_fit import PYTORCH
from outcore.ir.layout import Hold, Move, Release


class MisfitError(Exception):
    """A request would not get its place: it is another block's."""


@dataclass(slots=True)
class _Part:
    """Bytes from `start` to `stop`: of a block, held by a piece, or free."""

    start: int
    stop: int
    used: bool = False
    piece: int | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def free(self) -> bool:
        return not self.used and self.piece is None


@dataclass(slots=True)
class Stretch:
    """The stretch at one position of the program: parts side by side."""

    nbytes: int
    parts: list[_Part] = field(init=False)
    pieces: int = 0

    def __post_init__(self) -> None:
        """All of it is one piece at first."""
        self.parts = [_Part(0, self.nbytes, piece=0)]

    def open(self, holes: Sequence[tuple[int, int]]) -> Iterator[Move]:
        """Have nothing free but `holes`, as (offset, bytes). Raises MisfitError where one is not.

        All that is free is held, the smallest part first, from its start on: what is left of it is
        then the smallest free block that has the room for more.
        """
        wanted = sorted((offset, offset + size) for offset, size in holes)
        for part in self.parts:
            if any(part.start < stop and start < part.stop for start, stop in wanted):
                if part.used:
                    raise MisfitError
                if part.piece is not None:
                    yield Release(part.piece)
                    part.piece = None
        cuts = self._cuts(wanted)
        while (little := self._beside_little(cuts)) is not None:
            assert little.piece is not None  # noqa: S101 - what is found is held
            yield Release(little.piece)
            little.piece = None
            cuts = self._cuts(wanted)
        if all(hole for _, parts in cuts for _, hole in parts):
            return
        passing = []
        for run, parts in cuts:
            for part, hole in parts:
                self.pieces += 1
                yield Hold(self.pieces, part.start, part.nbytes)
                if hole:
                    passing.append(Release(self.pieces))
                else:
                    part.piece = self.pieces
            place = self.parts.index(run)
            self.parts[place : place + 1] = [part for part, _ in parts]
        yield from passing

    def _cuts(
        self, wanted: Sequence[tuple[int, int]]
    ) -> list[tuple[_Part, list[tuple[_Part, bool]]]]:
        """What each free part is cut into, the smallest first."""
        self._join()
        runs = sorted((part for part in self.parts if part.free), key=lambda part: part.nbytes)
        return [(run, [*_cut(run, wanted)]) for run in runs]

    def _beside_little(self, cuts: list[tuple[_Part, list[tuple[_Part, bool]]]]) -> _Part | None:
        """The piece beside what is too little to be held: it is part of a larger one from now on.

        Raises MisfitError where there is none.
        """
        for run, parts in cuts:
            place = self.parts.index(run)
            for number, (part, hole) in enumerate(parts):
                if hole or part.nbytes > PYTORCH.small_most:
                    continue
                before, after = self.parts[:place][-1:], self.parts[place + 1 :][:1]
                beside = before * (number == 0) + after * (number == len(parts) - 1)
                held = [each for each in beside if each.piece is not None]
                if not held:
                    raise MisfitError
                return held[0]
        return None

    def use(self, offset: int, nbytes: int) -> None:
        """A block lies there from now on."""
        self._join()
        stop = offset + nbytes
        place, part = next(
            (place, part)
            for place, part in enumerate(self.parts)
            if part.free and part.start <= offset and stop <= part.stop
        )
        parts = _Part(part.start, offset), _Part(offset, stop, used=True), _Part(stop, part.stop)
        self.parts[place : place + 1] = [each for each in parts if each.nbytes]

    def free(self, offset: int) -> None:
        """The block at `offset` is no longer in use."""
        next(part for part in self.parts if part.start == offset).used = False

    def _join(self) -> None:
        """Let free parts beside each other be one, as the allocator has them."""
        joined: list[_Part] = []
        for part in self.parts:
            if joined and part.free and joined[-1].free:
                joined[-1] = _Part(joined[-1].start, part.stop)
            else:
                joined.append(part)
        self.parts = joined


def _cut(run: _Part, wanted: Iterable[tuple[int, int]]) -> Iterator[tuple[_Part, bool]]:
    """What lies side by side in a free part, and whether it is to be free."""
    at = run.start
    for start, stop in wanted:
        if run.start <= start < run.stop:
            if at < start:
                yield _Part(at, start), False
            yield _Part(start, stop), True
            at = stop
    if at < run.stop:
        yield _Part(at, run.stop), False
