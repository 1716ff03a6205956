"""Pass `sync`: give each action its stream, the hazards it waits for, and the plan's own waits.

A hazard orders two accesses of one slot if one of them writes (read after write, write after read).
It also orders the end of a place in an outer tier before its next owner. Edges that follow from the
order of the streams and from earlier edges are left out. A wait that only the plan wants (`pace`)
never replaces a hazard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from outcore.ir.hardware import Tier
from outcore.ir.program import Action, Alloc, Copy, Free, Instruction, Run, Slot, Stream
from outcore.ir.rooms import Rooms

STREAMS = tuple(Stream)

_Clock: TypeAlias = tuple[int, ...]
"""Per stream, the last position that must be done; -1 for none."""


@dataclass(slots=True)
class _Access:
    """The position of the last write to a slot, and of the reads since then."""

    write: int = -1
    reads: list[int] = field(default_factory=list)


def sync(
    slots: Sequence[Slot], actions: Iterable[Action], paces: Mapping[int, Sequence[int]]
) -> tuple[Instruction, ...]:
    """The instructions for `actions`, with streams and waits. Linear in actions.

    `paces`: position -> the positions that the plan wants done before it.
    """
    accesses = [_Access() for _ in slots]
    rooms = {tier: Rooms() for tier in Tier}
    body: list[Instruction] = []
    streams: list[int] = []
    clocks: list[_Clock] = []
    latest: list[_Clock] = [(-1,) * len(STREAMS)] * len(STREAMS)
    for position, action in enumerate(actions):
        stream = stream_of(slots, action)
        index = STREAMS.index(stream)
        hazards = _hazards(slots, accesses, rooms, action)
        after, clock = _unmet(hazards, latest[index], streams, clocks)
        pace, _ = _unmet(paces.get(position, ()), clock, streams, clocks)
        clock = (*clock[:index], position, *clock[index + 1 :])
        body.append(Instruction(action, stream, after, pace))
        streams.append(index)
        clocks.append(clock)
        latest[index] = clock
        _record(accesses, action, position)
    return tuple(body)


def _unmet(
    earlier: Iterable[int], clock: _Clock, streams: Sequence[int], clocks: Sequence[_Clock]
) -> tuple[tuple[int, ...], _Clock]:
    """Those of `earlier` that `clock` does not imply, ascending; the clock once they are done."""
    unmet = []
    for position in sorted(earlier, reverse=True):
        if clock[streams[position]] < position:
            unmet.append(position)
            clock = tuple(map(max, clock, clocks[position]))
    return tuple(reversed(unmet)), clock


def stream_of(slots: Sequence[Slot], action: Action) -> Stream:
    """The stream of an action, by its kind and the tier that it touches."""
    if isinstance(action, Run):
        return Stream.COMPUTE
    if isinstance(action, Copy):
        return Stream.OUT if slots[action.source].tier is Tier.DEVICE else Stream.IN
    if slots[action.slot].tier is Tier.DEVICE:
        return Stream.COMPUTE
    return Stream.OUT if isinstance(action, Alloc) else Stream.IN


def _hazards(
    slots: Sequence[Slot], accesses: list[_Access], rooms: dict[Tier, Rooms], action: Action
) -> set[int]:
    if isinstance(action, Alloc):
        return _room_hazards(slots[action.slot], accesses, rooms)
    if isinstance(action, Free):
        return _write_hazards(accesses[action.slot])
    if isinstance(action, Copy):
        found = _write_hazards(accesses[action.target])
        return (found | {accesses[action.source].write}) - {-1}
    given = {target: source for source, target in action.donate}
    found = {accesses[slot].write for slot in action.reads}
    for slot in action.writes:
        found |= _write_hazards(accesses[given.get(slot, slot)])
    return found - {-1}


def _write_hazards(access: _Access) -> set[int]:
    return {access.write, *access.reads} - {-1}


def _room_hazards(slot: Slot, accesses: list[_Access], rooms: dict[Tier, Rooms]) -> set[int]:
    if slot.tier is Tier.DEVICE:
        return set()
    owners = rooms[slot.tier].take(slot.offset, slot.offset + slot.nbytes, slot.id)
    return {accesses[owner].write for owner in owners} - {-1}


def _record(accesses: list[_Access], action: Action, position: int) -> None:
    if isinstance(action, Alloc | Free):
        accesses[action.slot] = _Access(position)
    elif isinstance(action, Copy):
        accesses[action.source].reads.append(position)
        accesses[action.target] = _Access(position)
    else:
        for slot in action.reads:
            accesses[slot].reads.append(position)
        for slot in action.writes:
            accesses[slot] = _Access(position)
