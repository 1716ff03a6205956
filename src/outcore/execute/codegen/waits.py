"""waits: which copies an instruction waits for."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.ir.program import Copy, Instruction, Stream


def copy_waits(body: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Map each body position to the copies on other streams that it must wait for.

    Allocs and frees of the outer tiers generate no calls. A wait for one becomes a wait for the
    last copy before it on its stream. A wait by one becomes a wait by the next copy on its
    stream.
    """
    latest: dict[Stream, int] = {}
    last: dict[int, int] = {}
    """Position on a copy stream -> the last copy at or before it on that stream."""
    carried: dict[Stream, set[int]] = {Stream.OUT: set(), Stream.IN: set()}
    waits: dict[int, tuple[int, ...]] = {}
    for position, instruction in enumerate(body):
        stream = instruction.stream
        if isinstance(instruction.action, Copy):
            latest[stream] = position
        if stream is not Stream.COMPUTE and stream in latest:
            last[position] = latest[stream]
        before = (*instruction.after, *instruction.pace)
        copies = {last[i] for i in before if i in last}
        if stream is Stream.COMPUTE:
            waits[position] = tuple(sorted(copies))
            continue
        carried[stream] |= copies
        if isinstance(instruction.action, Copy):
            waits[position] = tuple(sorted(carried[stream] - {position}))
            carried[stream] = set()
    return waits
