"""schedule: Sony's schedule of copies over a variable sequence.

From arXiv 2010.14109, section 3, and its code. At each function the window is extended over the
sequence. What newly enters it is brought back; what was about to leave stays after all. When memory
is needed, compute waits for the oldest copies out. After the function, what it used leaves, unless
the window contains it again. No times are used: bytes stand for both compute and copies.

In the published code, a prefetch that leaves a later function too little memory is noticed at that
function; the schedule then starts again with that prefetch postponed. Here the end of the window is
bounded beforehand. What is on the device at a function, once everything that left is gone, follows
from the window's end alone. So one walk from the back finds how far the window may reach, and the
schedule is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.policies.window.sequence import VariableSequence


@dataclass(frozen=True, slots=True)
class Absence:
    """One stay off the device."""

    position: int
    """The buffer leaves after the use at this position."""
    released: int
    """The function that waits for the copy out before it runs."""
    fetched: int
    """The function before which the copy back is issued."""


def schedule(
    sequence: VariableSequence, capacity_bytes: int, window_bytes: float
) -> tuple[Absence, ...] | None:
    """What leaves the device and when, in order of return; None if some function does not fit.

    `capacity_bytes` is the device's memory minus `fixed_bytes`. The window holds as many distinct
    variables as `window_bytes` allow, and at least those of its function. Linear in the sequence.
    """
    ends = window_ends(sequence, capacity_bytes)
    return None if ends is None else _Walk(sequence, capacity_bytes, window_bytes).run(ends)


def window_ends(sequence: VariableSequence, capacity_bytes: int) -> list[int] | None:
    """Per function, the furthest end of the window that leaves it and all later ones enough memory.

    None if some function's own variables do not fit.
    """
    order, nbytes, born = sequence.order, sequence.nbytes, sequence.born
    count = [0] * len(nbytes)
    end, held = len(order), 0
    ends: list[int] = []
    later: list[int] = []
    for function in range(len(sequence.ops) - 1, -1, -1):
        held -= sum(nbytes[v] for v in later)  # not made yet at this function
        variables = [order[p] for p in sequence.positions(function)]
        held += sum(nbytes[v] for v in variables if not count[v])
        for variable in variables:
            count[variable] += 1
        limit = capacity_bytes - sequence.beside_bytes[function]
        while held > limit and end > sequence.starts[function + 1]:
            end -= 1
            variable = order[end]
            count[variable] -= 1
            if not count[variable] and born[variable] <= function:
                held -= nbytes[variable]
        if held > limit:
            return None
        ends.append(end)
        later = [v for v in variables if born[v] == function]
    return ends[::-1]


class _Walk:
    """The device's memory while the window slides over the sequence, function by function."""

    def __init__(
        self, sequence: VariableSequence, capacity_bytes: int, window_bytes: float
    ) -> None:
        self.sequence = sequence
        self.capacity_bytes, self.most_window_bytes = capacity_bytes, window_bytes
        self.count = [0] * len(sequence.nbytes)
        """Per variable: how often it is in the window."""
        self.head = self.tail = 0
        """`head`: the end of the window. `tail`: the oldest use whose copy out may be in
        progress."""
        self.held_bytes = self.leaving_bytes = self.window_bytes = 0
        """`held_bytes`: variables of the window that are on the device. `leaving_bytes`: variables
        that are being copied out. `window_bytes`: variables of the window, made or not."""
        self.leaving: dict[int, int] = {}
        """Variable -> the position after which it leaves."""
        self.gone: dict[int, tuple[int, int]] = {}
        """Variable -> the position after which it left, and the function that waited for it."""
        self.returned: list[Absence] = []
        """The stays off the device that are over."""

    def run(self, ends: list[int]) -> tuple[Absence, ...]:
        """Walk all functions; `ends` bounds the end of the window at each."""
        for function, end in enumerate(ends):
            self._extend(function, end)
            self._make(function)
            self._leave(function)
        return tuple(self.returned)

    # ---- before a function ----------------------------------------------------------------------

    def _extend(self, function: int, end: int) -> None:
        """Let variables into the window while they fit, up to `end`; the function's own anyway."""
        order, nbytes = self.sequence.order, self.sequence.nbytes
        own = self.sequence.starts[function + 1]
        room = self.capacity_bytes - self.sequence.beside_bytes[function]
        while self.head < end:
            variable = order[self.head]
            if not self.count[variable]:
                wide = self.window_bytes + nbytes[variable] > self.most_window_bytes
                if self.head >= own and (wide or self.held_bytes + nbytes[variable] > room):
                    return
                self._enter(variable, function)
            self.count[variable] += 1
            self.head += 1

    def _enter(self, variable: int, function: int) -> None:
        """Let `variable` in: cancel its copy out if it is leaving, bring it back if it is gone."""
        nbytes = self.sequence.nbytes[variable]
        self.window_bytes += nbytes
        if variable in self.leaving:
            del self.leaving[variable]
            self.leaving_bytes -= nbytes
            self.held_bytes += nbytes
        elif variable in self.gone:
            self._make_room(function, nbytes)
            self.returned.append(Absence(*self.gone.pop(variable), function))
            self.held_bytes += nbytes

    def _make(self, function: int) -> None:
        """Make room for what the function makes; until now no room was reserved for it."""
        sequence = self.sequence
        variables = (sequence.order[p] for p in sequence.positions(function))
        made = sum(sequence.nbytes[v] for v in variables if sequence.born[v] == function)
        self._make_room(function, made)
        self.held_bytes += made

    def _make_room(self, function: int, nbytes: int) -> None:
        """Wait for copies out, the oldest first, until `nbytes` more fit."""
        sequence = self.sequence
        room = self.capacity_bytes - sequence.beside_bytes[function] - nbytes
        while self.held_bytes + self.leaving_bytes > room and self.tail < sequence.starts[function]:
            variable = sequence.order[self.tail]
            if self.leaving.get(variable) == self.tail:
                del self.leaving[variable]
                self.gone[variable] = (self.tail, function)
                self.leaving_bytes -= sequence.nbytes[variable]
            self.tail += 1

    # ---- after it -------------------------------------------------------------------------------

    def _leave(self, function: int) -> None:
        """Send out what the window does not contain again; free what nothing uses again."""
        sequence = self.sequence
        for position in sequence.positions(function):
            variable = sequence.order[position]
            self.count[variable] -= 1
            if self.count[variable]:
                continue
            nbytes = sequence.nbytes[variable]
            self.window_bytes -= nbytes
            self.held_bytes -= nbytes
            if sequence.next_use[position] is not None:
                self.leaving[variable] = position
                self.leaving_bytes += nbytes
