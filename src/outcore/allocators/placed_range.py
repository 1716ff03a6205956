"""PlacedRange: hold free memory in pieces, so that requests get their planned places.

A request gets the smallest free block that is large enough. So all free memory of a stretch is held
by pieces, except what the next op requests: blocks of exactly that size, where they are to lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outcore.allocators.best_fit import PYTORCH
from outcore.ir.layout import Hold, Move, Release


class MisfitError(Exception):
    """A request would not get its place, because another block is there."""


@dataclass(slots=True)
class _Part:
    """The bytes from `start` to `stop`: used by a block, held by a piece, or free."""

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
class PlacedRange:
    """The stretch at one body position, as adjacent parts."""

    nbytes: int
    parts: list[_Part] = field(init=False)
    pieces: int = 0

    def __post_init__(self) -> None:
        """At first, all of it is one piece."""
        self.parts = [_Part(0, self.nbytes, piece=0)]

    def open(self, holes: Sequence[tuple[int, int]]) -> Iterator[Move]:
        """Free `holes`, as (offset, bytes), and hold the rest. Raises MisfitError if one is in use.

        All that is free is held, the smallest part first, each from its start. The rest of a part
        is then the smallest free block that is large enough for what follows. Holes are held, too,
        for a moment: if memory that should be free by now is in use, holding it shows that. A
        request would fail, as everything else is held.
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

    def pause(self) -> tuple[tuple[Release, ...], tuple[Hold, ...]]:
        """Release all pieces, and then hold all that is free again, the smallest part first.

        Parts that are too small to be held stay free.
        """
        held = [part for part in self.parts if part.piece is not None]
        released = tuple(Release(part.piece) for part in held if part.piece is not None)
        for part in held:
            part.piece = None
        holds = []
        for part, _ in self._cuts(()):
            if part.nbytes > PYTORCH.small_most:
                self.pieces += 1
                part.piece = self.pieces
                holds.append(Hold(self.pieces, part.start, part.nbytes))
        return released, tuple(holds)

    def _cuts(
        self, wanted: Sequence[tuple[int, int]]
    ) -> list[tuple[_Part, list[tuple[_Part, bool]]]]:
        """The free parts, the smallest first, with what each is cut into."""
        self._join()
        runs = sorted((part for part in self.parts if part.free), key=lambda part: part.nbytes)
        return [(run, [*_cut(run, wanted)]) for run in runs]

    def _beside_little(self, cuts: list[tuple[_Part, list[tuple[_Part, bool]]]]) -> _Part | None:
        """A held part next to a part that is too small to be held.

        `open` releases it, so that the two are merged. None if no part is too small. Raises
        MisfitError if no held part is next to one.
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
        """A block is at `offset` from now on."""
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
        """Merge adjacent free parts, as the allocator does."""
        joined: list[_Part] = []
        for part in self.parts:
            if joined and part.free and joined[-1].free:
                joined[-1] = _Part(joined[-1].start, part.stop)
            else:
                joined.append(part)
        self.parts = joined


def _cut(run: _Part, wanted: Iterable[tuple[int, int]]) -> Iterator[tuple[_Part, bool]]:
    """The parts that a free part is cut into, and for each whether it is to be free."""
    at = run.start
    for start, stop in wanted:
        if run.start <= start < run.stop:
            if at < start:
                yield _Part(at, start), False
            yield _Part(start, stop), True
            at = stop
    if at < run.stop:
        yield _Part(at, run.stop), False
