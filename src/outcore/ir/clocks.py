"""Clocks: which instructions of a Program are ordered before which, by vector clocks.

The clock of an instruction holds, per stream, the last body position that must be done before the
instruction is done (its own included). These are the clocks of Fidge and Mattern (1988), with
streams for processes and `after` edges for messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outcore.ir.program import Instruction, Stream

_INDEX = {stream: index for index, stream in enumerate(Stream)}
_NEVER = (-1,) * len(Stream)


class Clocks:
    """The vector clocks of the instructions issued so far."""

    def __init__(self, body: Sequence[Instruction]) -> None:
        self.streams = [_INDEX[instruction.stream] for instruction in body]
        self.done: list[tuple[int, ...]] = []
        self.latest = [_NEVER] * len(Stream)

    def issue(self, after: Iterable[int]) -> None:
        """Issue the next instruction of the body. It waits for the earlier positions `after`."""
        position = len(self.done)
        stream = self.streams[position]
        clock = self.latest[stream]
        for earlier in after:
            clock = tuple(map(max, clock, self.done[earlier]))
        clock = (*clock[:stream], position, *clock[stream + 1 :])
        self.done.append(clock)
        self.latest[stream] = clock

    def ordered(self, earlier: int, position: int) -> bool:
        """Whether `earlier` must be done before `position` is done."""
        return self.done[position][self.streams[earlier]] >= earlier

    def known(self, position: int, stream: Stream) -> bool:
        """Whether `position` is done before anything that is issued next on `stream` starts."""
        return self.latest[_INDEX[stream]][self.streams[position]] >= position
