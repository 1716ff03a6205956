"""layout: a place for each large slot of a program, and moves that have a GPU's allocator use it.

The smallest free block that has the room gets a request. So all that is free of a stretch is held
but for what an op is about to ask for: a block just as large, where it is to lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from outcore.allocators.best_fit import MIB, PYTORCH
from outcore.allocators.blocks import round_up
from outcore.allocators.packing import Stay, pack
from outcore.ir.hardware import Tier
from outcore.ir.layout import Hold, Layout, Move, Release
from outcore.ir.memory import peak
from outcore.ir.problem import Problem
from outcore.ir.program import Alloc, Copy, Free, Program, Run
from outcore.ir.totals import resident_bytes
from outcore.ir.verify import ITEM_BYTES

MOST_GUEST_BYTES = 256 * MIB
"""A result is there twice until it is copied elsewhere: larger ones take too much. An op that makes
nothing else can make them there."""

UNIT = 2 * MIB
"""Places begin and end at multiples of this. What an odd size leaves of one is held too, and so
large (more than 1 MiB) that torch has it lie where large blocks do. Where one op asks for several
blocks, each place has such a rest: beside each other, two would be one free block."""

BESIDE_BYTES = 128 * MIB
"""Room for small blocks, for pages in use in part, for what libraries keep for a stream of its own,
and for what holds the ends of the stretch."""

ATTEMPTS = 4
"""Packings that are tried: in some, of two blocks that are as large, and that one op asks for, one
gets the place of the other, and stays there for longer."""


def lay_out(
    problem: Problem, program: Program, budget_bytes: int, after_bytes: int = 0
) -> Layout | None:
    """Places for all that the ops of `program` ask for, but for small blocks.

    With what is in use besides they stay within `budget_bytes`, and so does the stretch, which is
    kept, with `after_bytes` that come once a step is over. None where no places are found, and
    where a result is copied back (it would be moved before it has come), or is too large and made
    beside what is not one.
    """
    wanted = _Wanted(problem, program)
    guests = wanted.guests.values()
    if any(block.nbytes > MOST_GUEST_BYTES or wanted.fetches(block) for block in guests):
        return None
    if not wanted.guests.keys() <= wanted.whole():
        return None
    outside = max(wanted.outside_bytes(), resident_bytes(problem) + after_bytes) + BESIDE_BYTES
    stays = [block.stay for block in wanted.blocks]
    for seed in range(ATTEMPTS if stays else 0):
        offsets = pack(stays, budget_bytes - outside, seed)
        if offsets is None:
            return None
        try:
            return _laid(wanted, offsets, outside)
        except _MisfitError:
            continue
    return None


class _MisfitError(Exception):
    """A request would not get its place: it is another block's."""


@dataclass(slots=True)
class _Block:
    """What an op asks for, in bytes as the allocator rounds them; a workspace has no slot."""

    first: int
    nbytes: int
    slot: int | None = None
    last: int = 0
    alone: bool = True
    """Whether its op asks for nothing else."""

    @property
    def stay(self) -> Stay:
        """Its time, and the bytes of its place."""
        exact = self.alone and not self.nbytes % UNIT
        rest = 0 if exact else MIB + PYTORCH.round_small
        return Stay(self.first, self.last, round_up(self.nbytes + rest, UNIT))


class _Wanted:
    """What the ops of a program ask for, but for small blocks."""

    def __init__(self, problem: Problem, program: Program) -> None:
        self.problem, self.program = problem, program
        self.requests: dict[int, list[_Block]] = {}
        """Body position -> what is asked for there, in that order."""
        self.frees: dict[int, _Block] = {}
        """Body position -> what is free from there on."""
        self.guests: dict[int, _Block] = {}
        """Slot that outlives the program -> the block that it lies in at first."""
        self.at_home: set[int] = set()
        """Body positions whose op asks for nothing here."""
        self._inside: dict[int, int] = {}
        """Slot -> its first one: those that lie here."""
        self._find()
        self.blocks = [block for blocks in self.requests.values() for block in blocks]

    def outside_bytes(self) -> int:
        """The most that is in use besides, where what the caller gives stays until the end."""
        slots = [
            replace(slot, nbytes=0) if slot.id in self._inside else slot
            for slot in self.program.slots
        ]
        profile = self.problem.profile
        ops = {self._op(block.first) for block in self.blocks if block.slot is None}
        rest = (0 if op in ops else n for op, n in enumerate(profile.workspace_bytes))
        problem = replace(self.problem, profile=replace(profile, workspace_bytes=tuple(rest)))
        given, stays = {*self.program.arguments, *self.program.tangents}, 0
        for action in (instruction.action for instruction in self.program.body):
            if isinstance(action, Run):
                given.update(target for source, target in action.donate if source in given)
            elif isinstance(action, Free) and action.slot in given:
                stays += slots[action.slot].nbytes
        program = replace(self.program, slots=tuple(slots))
        return peak(problem, program, Tier.DEVICE).nbytes + stays

    def whole(self) -> set[int]:
        """The slots that are all of one tensor: such can be copied."""
        trace = self.problem.trace
        whole = {
            value.buffer
            for value in trace.values
            if prod(value.shape) * ITEM_BYTES[value.dtype] == trace.buffers[value.buffer].nbytes
        }
        return {slot.id for slot in self.program.slots if slot.buffer in whole}

    def fetches(self, block: _Block) -> bool:
        """Whether a block is asked for by a copy back."""
        return isinstance(self.program.body[block.first].action, Copy)

    def _op(self, position: int) -> int | None:
        action = self.program.body[position].action
        return action.op if isinstance(action, Run) else None

    def _writes(self, position: int) -> set[int]:
        action = self.program.body[position].action
        return {*action.writes} if isinstance(action, Run) else set()

    def _find(self) -> None:
        """Go through the program twice: what outlives it is known in the end."""
        lasts = self._lasts()
        waiting: set[int] = set()
        for position, instruction in enumerate(self.program.body):
            action = instruction.action
            if isinstance(action, Alloc):
                waiting.add(action.slot)
            elif isinstance(action, Copy | Run):
                slots = (action.target,) if isinstance(action, Copy) else action.writes
                asked = [slot for slot in dict.fromkeys(slots) if slot in waiting]
                waiting.difference_update(asked)
                self._ask(position, asked, lasts)

    def _lasts(self) -> dict[int, int]:
        """Slot -> the body position from which its memory is free; donated memory counts as one."""
        lasts: dict[int, int] = {}
        heirs: dict[int, int] = {}
        for position, instruction in enumerate(self.program.body):
            action = instruction.action
            if isinstance(action, Free):
                lasts[action.slot] = position
            elif isinstance(action, Run):
                heirs.update(action.donate)
        for slot in heirs:
            heir = slot
            while heir in heirs:
                heir = heirs[heir]
            if heir in lasts:
                lasts[slot] = lasts[heir]
            else:
                lasts.pop(slot, None)
        self._heirs = heirs
        return lasts

    def _ask(self, position: int, asked: Sequence[int], lasts: dict[int, int]) -> None:
        blocks: list[_Block] = []
        slots = [self.program.slots[index] for index in asked]
        large = any(slot.nbytes > MOST_GUEST_BYTES for slot in slots)
        if large and lasts.keys().isdisjoint(asked) and self._writes(position) == {*asked}:
            self.at_home.add(position)
            return
        for slot in slots:
            if slot.tier is not Tier.DEVICE or slot.nbytes <= PYTORCH.small_most:
                continue
            size = round_up(slot.nbytes, PYTORCH.round_small)
            block = _Block(position, size, slot.id, lasts.get(slot.id, position + 1))
            blocks.append(block)
            if slot.id in lasts:
                self.frees[block.last] = block
                self._inherit(slot.id)
            else:
                self.guests[slot.id] = block
        workspace = self._workspace_bytes(position)
        if workspace > PYTORCH.small_most:
            # Of several pieces, perhaps; and none that asks for a slot's bytes is to get its place.
            size = round_up(workspace + MIB, UNIT)
            size += UNIT * any(block.nbytes == size for block in blocks)
            blocks.append(_Block(position, size, last=position + 1))
        for block in blocks:
            block.alone = len(blocks) == 1
        if blocks:
            self.requests[position] = blocks

    def _inherit(self, slot: int) -> None:
        heir: int | None = slot
        while heir is not None:
            self._inside[heir] = slot
            heir = self._heirs.get(heir)

    def _workspace_bytes(self, position: int) -> int:
        action = self.program.body[position].action
        if not isinstance(action, Run):
            return 0
        return self.problem.profile.cost(action.op, action.variant).workspace_bytes


def _laid(wanted: _Wanted, offsets: Sequence[int], outside_bytes: int) -> Layout:
    """The moves for blocks at `offsets`. Raises _MisfitError where none would do."""
    at = {id(block): offset for block, offset in zip(wanted.blocks, offsets, strict=True)}
    nbytes = max(at[id(block)] + block.stay.nbytes for block in wanted.blocks)
    stretch = _Stretch(nbytes)
    moves: dict[int, tuple[Move, ...]] = {}
    places: dict[int, int] = {}
    for position in range(len(wanted.program.body)):
        blocks = wanted.requests.get(position, ())
        if blocks:
            holes = _in_order(blocks, at)
            moves[position] = tuple(stretch.open(holes))
            for block, (offset, size) in zip(blocks, holes, strict=True):
                at[id(block)] = offset
                if block.slot is not None:
                    places[block.slot] = offset
                if block.last > position + 1:
                    stretch.use(offset, size)
        freed = wanted.frees.get(position)
        if freed is not None and freed.last > freed.first + 1:
            stretch.free(at[id(freed)])
    return Layout(
        nbytes=nbytes,
        moves=moves,
        positions={b.slot: b.first for b in wanted.blocks if b.slot is not None},
        offsets=places,
        guests=frozenset(wanted.guests),
        at_home=frozenset(wanted.at_home),
        peak_bytes=outside_bytes + nbytes,
    )


def _in_order(blocks: Sequence[_Block], at: dict[int, int]) -> list[tuple[int, int]]:
    """Place and bytes of the blocks that one op asks for, in the order in which it does.

    Of several as large as each other the first gets the lowest place.
    """
    by_size: dict[int, list[int]] = {}
    for block in blocks:
        by_size.setdefault(block.nbytes, []).append(at[id(block)])
    lowest = {size: iter(sorted(offsets)) for size, offsets in by_size.items()}
    return [(next(lowest[block.nbytes]), block.nbytes) for block in blocks]


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
class _Stretch:
    """The stretch at one position of the program: parts side by side."""

    nbytes: int
    parts: list[_Part] = field(init=False)
    pieces: int = 0

    def __post_init__(self) -> None:
        """All of it is one piece at first."""
        self.parts = [_Part(0, self.nbytes, piece=0)]

    def open(self, holes: Sequence[tuple[int, int]]) -> Iterator[Move]:
        """Have nothing free but `holes`, as (offset, bytes). Raises _MisfitError where one is not.

        All that is free is held, the smallest part first, from its start on: what is left of it is
        then the smallest free block that has the room for more.
        """
        wanted = sorted((offset, offset + size) for offset, size in holes)
        for part in self.parts:
            if any(part.start < stop and start < part.stop for start, stop in wanted):
                if part.used:
                    raise _MisfitError
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

        Raises _MisfitError where there is none.
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
                    raise _MisfitError
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
