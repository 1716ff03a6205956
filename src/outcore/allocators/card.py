"""card: what a process may take of a GPU, and what its allocator makes of that.

A plan bounds tensors. On a device that is all but full, free memory lies in pieces: where none is
large enough, torch waits for the device, gives pages back and takes others. A plan that leaves more
room takes a little longer, and is spared that (decision 0036).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from outcore.allocators.allocator import Allocator
from outcore.allocators.expandable import Held
from outcore.allocators.reserve import reserve
from outcore.ir.problem import Problem
from outcore.ir.program import Program

HEADROOM_DIVISOR = 32
"""This part of a GPU's free memory stays out of the default budget: torch's allocator takes memory
in pages of up to 20 MiB, and between tensors they are seldom full."""

ROOM_DIVISOR, LEAST_ROOM_BYTES = 16, 256 << 20
"""This part of a GPU, or so many bytes where that is more (but no more than a quarter), plans leave
free if they can. Pieces of pages torch's allocator cannot give back."""

TIMES_ROOM = (1, 2)
"""The rooms that are tried: a 16th, and an 8th."""

SERVED_STEPS = 4
"""Training steps that the allocator's model serves: what it gives back changes from one to the next
until it has found where things lie well, which may be never."""

DISTURBED, OTHERS, LARGEST_OTHER = 4, 3, 4 << 20
"""They are served so many times, but for the first with so many blocks of others in between, of one
to four MiB: a loss, an optimizer or a metric takes some, and one such block may move all that comes
after it. A plan whose tensors find their place each time will do."""

GIVEN_BACK_BYTES_PER_SECOND = 200 << 30
"""An H100's rate: what 16 ms each, as measured there, come to by the bytes of the model."""


@dataclass(frozen=True, slots=True)
class Card:
    """So many bytes of a GPU, and what hands them out."""

    limit_bytes: int
    allocator: Allocator
    held: Held | None = None
    """What the process holds of it as steps begin; None: not known."""

    @property
    def spare_bytes(self) -> int:
        """What tensors may take of it: a little is left to the allocator."""
        return self.limit_bytes - self.limit_bytes // HEADROOM_DIVISOR

    def rooms(self, budget_bytes: int) -> tuple[int, ...]:
        """What plans should leave free of a budget, if they can, the least first.

        Only 0 where the budget is small beside the card.
        """
        least = max(self.limit_bytes // ROOM_DIVISOR, min(LEAST_ROOM_BYTES, self.limit_bytes // 4))
        spare = self.limit_bytes - budget_bytes
        rooms = (max(0, least * times - spare) for times in TIMES_ROOM)
        return tuple(dict.fromkeys(rooms))

    def lost_seconds(self, problem: Problem, program: Program, most_seconds: float = inf) -> float:
        """What a step loses, by the model, while the allocator gives memory back and takes other.

        Serves the program some times: n log n for n instructions. Where it is more than
        `most_seconds`, something above that.
        """
        lost, draws = 0.0, random.Random(0)
        for number in range(DISTURBED):
            others = [
                (draws.randrange(max(1, len(program.body))), draws.randint(1 << 20, LARGEST_OTHER))
                for _ in range(OTHERS if number else 0)
            ]
            served = reserve(
                problem,
                program,
                self.allocator,
                capacity_bytes=self.limit_bytes,
                steps=SERVED_STEPS,
                held=self.held,
                others=others,
            )
            lost += served.given_back_bytes / GIVEN_BACK_BYTES_PER_SECOND / DISTURBED
            if lost > most_seconds:
                break
        return lost
