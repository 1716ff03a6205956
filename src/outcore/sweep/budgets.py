"""BudgetRange: the budgets of a sweep, evenly spaced between two ends, which are included."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.compare import Comparison, read_budget
from outcore.errors import BudgetError
from outcore.policies.floor import infeasible
from outcore.units import format_bytes

FLOOR = "floor"
"""The word that stands for the smallest budget that some plan meets."""


@dataclass(frozen=True, slots=True)
class BudgetRange:
    """`steps` budgets (at least 2) from `start` to `stop`, as given to the command's options.

    An end is a size, a percentage of the in-core peak, or `floor`. If `stop` is None, the range
    ends at the in-core peak, or at the machine's memory if that is less.
    """

    start: str = FLOOR
    stop: str | None = None
    steps: int = 8

    def check(self, machine_bytes: int) -> None:
        """Raise BudgetError for an end that is impossible on the machine, whatever the trace."""
        for option, text in (("--from", self.start), ("--to", self.stop or FLOOR)):
            _read(option, text, machine_bytes, floor_bytes=1, peak_bytes=machine_bytes)

    def budgets(self, comparison: Comparison) -> tuple[int, ...]:
        """Bytes, ascending, without duplicates.

        Raises InfeasibleError if no plan fits the machine; BudgetError for an end that is more than
        the machine has, or if the ends are in the wrong order.
        """
        lowest, machine = comparison.floor().floor, comparison.machine_bytes
        least, peak = comparison.budget_for(lowest.nbytes), comparison.in_core_peak_bytes
        if least > machine:
            raise infeasible(comparison.problem(machine), replace(lowest, nbytes=least))
        first = _read("--from", self.start, machine, least, peak)
        last = min(comparison.budget_for(peak), machine)
        if self.stop is not None:
            last = _read("--to", self.stop, machine, least, peak)
        if first > last:
            reason = f"it is {format_bytes(first)}, which is above the other end"
            reason += f" ({format_bytes(last)}); the floor is {format_bytes(least)}"
            reason += f" and the in-core peak {format_bytes(peak)}"
            raise BudgetError(option="--from", value=self.start, reason=reason)
        return spaced(first, last, self.steps)


def spaced(first: int, last: int, steps: int) -> tuple[int, ...]:
    """Whole numbers at equal distances (rounded down), with both ends and without duplicates."""
    return tuple(dict.fromkeys(first + (last - first) * i // (steps - 1) for i in range(steps)))


def _read(option: str, text: str, machine_bytes: int, floor_bytes: int, peak_bytes: int) -> int:
    if text == FLOOR:
        return floor_bytes
    return read_budget(option, text, machine_bytes, part_of=peak_bytes)
