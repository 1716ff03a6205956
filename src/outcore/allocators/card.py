"""Card: what a process may use of a GPU, and the time that its allocator costs.

A plan bounds the bytes of tensors. On a device that is almost full, free memory is fragmented. If
no free block is large enough, torch waits for the device, gives pages back and maps others. A plan
that leaves more memory free takes a little longer, but avoids that (decision 0036).
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
"""This fraction of a GPU's free memory is left out of the default budget: torch's allocator maps
memory in pages of up to 20 MiB, and between tensors they are seldom full."""

ROOM_DIVISOR, LEAST_ROOM_BYTES = 16, 256 << 20
"""What plans leave free of a GPU if they can: a 16th, or `LEAST_ROOM_BYTES` if that is more (but no
more than a quarter). Torch's allocator cannot give back parts of pages."""

TIMES_ROOM = (1, 2)
"""Multiples of that room that are tried: a 16th and an 8th."""

SERVED_STEPS = 4
"""Training steps that the allocator's model serves. What it gives back changes from step to step
until it has found places that work for all, which may be never."""

DISTURBED, OTHERS, LARGEST_OTHER = 4, 3, 4 << 20
"""The steps are served `DISTURBED` times. In all but the first, `OTHERS` blocks of other code, of
one to four MiB, are requested in between: a loss, an optimizer or a metric needs some, and one such
block may move everything after it. A plan is good if its tensors find their places each time."""

GIVEN_BACK_BYTES_PER_SECOND = 200 << 30
"""The rate on an H100: 16 ms for each time, as measured, for the bytes that the model counts."""


@dataclass(frozen=True, slots=True)
class Card:
    """The bytes of a GPU that a process may use, and the model of its allocator."""

    limit_bytes: int
    allocator: Allocator
    held: Held | None = None
    """What the process holds of it when steps begin; None if unknown."""

    @property
    def spare_bytes(self) -> int:
        """The bytes that tensors may use; a little is left to the allocator."""
        return self.limit_bytes - self.limit_bytes // HEADROOM_DIVISOR

    def rooms(self, budget_bytes: int) -> tuple[int, ...]:
        """The bytes of a budget that plans should leave free if they can, the least first.

        Only 0 if the budget is small compared to the card.
        """
        least = max(self.limit_bytes // ROOM_DIVISOR, min(LEAST_ROOM_BYTES, self.limit_bytes // 4))
        spare = self.limit_bytes - budget_bytes
        rooms = (max(0, least * times - spare) for times in TIMES_ROOM)
        return tuple(dict.fromkeys(rooms))

    def lost_seconds(self, problem: Problem, program: Program, most_seconds: float = inf) -> float:
        """The seconds that a step loses, by the model, while the allocator gives memory back.

        The model serves the program several times: n log n for n instructions. If the loss is more
        than `most_seconds`, the result is some number above that.
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
