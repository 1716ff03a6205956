"""The figures of a sweep: a row for each budget, a column for each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isclose

from outcore.compare import Compared, Comparison
from outcore.policies import Policy


@dataclass(frozen=True, slots=True)
class Sweep:
    """What policies make of budgets; all predicted, and each figure of the policy's own plan.

    `rows` hold seconds; slowdowns are of those of the step in-core, 1 being no slower.
    """

    in_core_seconds: float
    in_core_peak_bytes: int
    floor_bytes: int
    rows: tuple[Compared, ...]

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes, ascending."""
        return tuple(dict.fromkeys(row.budget_bytes for row in self.rows))

    @property
    def policies(self) -> tuple[str, ...]:
        """Specs, in the order they were given."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    @property
    def cells(self) -> dict[tuple[int, str], Compared]:
        """(budget in bytes, spec) -> its row."""
        return {(row.budget_bytes, row.policy): row for row in self.rows}

    def slowdowns(self, policy: str) -> list[float | None]:
        """For each budget that of the policy's plan; None where it has none."""
        cells = self.cells
        return [self.slowdown(cells[budget, policy].seconds) for budget in self.budgets]

    def slowdown(self, seconds: float | None) -> float | None:
        """Of a step that takes `seconds`."""
        return None if seconds is None else seconds / self.in_core_seconds

    def bounds(self) -> dict[int, float]:
        """Budget -> seconds that no plan beats, where that is known."""
        found = ((row.budget_bytes, row.lower_bound_seconds) for row in self.rows)
        return {budget: seconds for budget, seconds in found if seconds is not None}

    def fastest(self) -> dict[int, frozenset[str]]:
        """Budget -> the policies with the fastest plan: several where they are equal."""
        found = {}
        for budget in self.budgets:
            rows = [row for row in self.rows if row.budget_bytes == budget]
            timed = {row.policy: row.seconds for row in rows if row.seconds is not None}
            least = min(timed.values(), default=0.0)
            found[budget] = frozenset(p for p, s in timed.items() if isclose(s, least))
        return found


def sweep(
    comparison: Comparison,
    budgets: Sequence[int],
    policies: Iterable[str | Policy],
    *,
    bound: bool = True,
    watch: Callable[[Compared], object] | None = None,
) -> Sweep:
    """Plan for every budget by every policy; `watch` is called with each row as it is done.

    `bound`: with the lower bound of each budget. Raises as `Comparison.rows`.
    """
    rows = []
    for row in comparison.rows(budgets, policies, bound=bound):
        rows.append(row)
        if watch is not None:
            watch(row)
    floor_bytes = comparison.floor().floor.nbytes
    peak_bytes = comparison.in_core_peak_bytes
    return Sweep(comparison.in_core.seconds, peak_bytes, floor_bytes, tuple(rows))
