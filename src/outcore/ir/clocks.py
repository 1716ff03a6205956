"""Happens-before among the instructions of a Program: a vector clock of one count per stream.

An instruction's clock holds, per stream, the last body position that must be done before it is (its
own included). These are the clocks of Fidge and Mattern (1988), with streams for processes and
`after` edges for messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outcore.ir.program import Instruction, Stream

_INDEX = {stream: index for index, stream in enumerate(Stream)}
_NEVER = (-1,) * len(Stream)


class Clocks:
    """The clocks of the instructions issued so far."""

    def __init__(self, body: Sequence[Instruction]) -> None:
        self.streams = [_INDEX[instruction.stream] for instruction in body]
        self.done: list[tuple[int, ...]] = []
        self.latest = [_NEVER] * len(Stream)

    def issue(self, after: Iterable[int]) -> None:
        """The next instruction in order of issue; it waits for the positions `after`, before it."""
        position = len(self.done)
        stream = self.streams[position]
        clock = self.latest[stream]
        for earlier in after:
            clock = tuple(map(max, clock, self.done[earlier]))
        clock = (*clock[:stream], position, *clock[stream + 1 :])
        self.done.append(clock)
        self.latest[stream] = clock

    def ordered(self, earlier: int, position: int) -> bool:
        """Whether `earlier` must be done before `position` is."""
        return self.done[position][self.streams[earlier]] >= earlier

    def known(self, position: int, stream: Stream) -> bool:
        """Whether whatever `stream` is issued next finds `position` done."""
        return self.latest[_INDEX[stream]][self.streams[position]] >= position
