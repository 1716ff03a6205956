"""window: Sony's scheduler: bring back what the next bytes of the step use, offload the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps
from outcore.ir.plan import Choice, Gap, Offload, Plan
from outcore.ir.problem import Problem
from outcore.policies.candidates import away
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle, settle_within
from outcore.policies.window.schedule import schedule
from outcore.policies.window.sequence import VariableSequence, variable_sequence


@dataclass(frozen=True, slots=True)
class Window:
    """Slide a window of bytes over all that the step touches; what it does not hold may leave.

    The window holds distinct buffers of `lookahead` times the memory that is available for them
    (section 3; 1.5 in the published code).
    """

    name: ClassVar[str] = "window"
    summary: ClassVar[str] = (
        "offload what the next bytes of the step do not use, fetch what they do"
    )

    min_bytes: int = MIN_BYTES
    """Smaller buffers stay on the device."""
    lookahead: float = 1.5
    """Bytes in the window, as a multiple of the memory that is available for them."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)
        if not self.lookahead > 0:
            reason = f"lookahead={self.lookahead}: it is a number above 0"
            raise PolicyError(policy=self.name, reason=reason)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the schedule. Raises InfeasibleError if not even offloading every gap fits.

        If everything fits, it is kept: a program may need less than its sequence of variables.
        """
        leave = away(problem)
        try:
            return settle(problem, {}, self)
        except InfeasibleError:
            if not isinstance(leave, Offload):
                raise
        movable = _movable(problem, self.min_bytes)
        sequence = variable_sequence(problem, self.min_bytes)
        capacity_bytes = problem.budget_bytes - sequence.fixed_bytes
        choose = partial(self._choices, sequence, movable, leave.tier)
        return settle_within(problem, capacity_bytes, choose, dict.fromkeys(movable, leave), self)

    def _choices(
        self,
        sequence: VariableSequence,
        movable: dict[Gap, None],
        tier: Tier,
        capacity_bytes: int,
    ) -> dict[Gap, Choice] | None:
        """The schedule's choices; None if it has none in `capacity_bytes`."""
        trips = schedule(sequence, capacity_bytes, self.lookahead * capacity_bytes)
        if trips is None:
            return None
        ops = sequence.ops
        chosen = {
            sequence.gap(trip.position): Offload(
                tier, release=ops[trip.released], prefetch=ops[trip.fetched]
            )
            for trip in trips
        }
        return {gap: choice for gap, choice in chosen.items() if gap in movable}


def _movable(problem: Problem, min_bytes: int) -> dict[Gap, None]:
    """Every gap of buffers of at least `min_bytes`, in the order of the gaps."""
    trace = problem.trace
    every = gaps(trace)
    return {gap: None for gap in every if trace.buffers[gap.buffer].nbytes >= min_bytes}
