"""table: plan for each budget and policy, and collect the figures in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isclose

from outcore.compare import Compared, Comparison
from outcore.policies import Policy


@dataclass(frozen=True, slots=True)
class Sweep:
    """What policies achieve at different budgets. All figures are predicted.

    Each figure is of the policy's own plan. `rows` hold seconds. A slowdown is a time divided by
    the in-core time, so 1 means no slower.
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
        """Policy specs, in the order in which they were given."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    @property
    def cells(self) -> dict[tuple[int, str], Compared]:
        """Map (budget in bytes, policy spec) to its row."""
        return {(row.budget_bytes, row.policy): row for row in self.rows}

    def slowdowns(self, policy: str) -> list[float | None]:
        """The `slowdown` of the policy's plan for each budget; None where it has no plan."""
        cells = self.cells
        return [self.slowdown(cells[budget, policy].seconds) for budget in self.budgets]

    def slowdown(self, seconds: float | None) -> float | None:
        """The slowdown of a step that takes `seconds`; None if in-core, it takes no time."""
        if seconds is None or not self.in_core_seconds:
            return None
        return seconds / self.in_core_seconds

    def has_plan(self, policy: str) -> bool:
        """Whether the policy has a plan for any budget."""
        return any(row.seconds is not None for row in self.rows if row.policy == policy)

    def bounds(self) -> dict[int, float]:
        """Map each budget to the seconds that no plan beats, where they are known."""
        found = ((row.budget_bytes, row.lower_bound_seconds) for row in self.rows)
        return {budget: seconds for budget, seconds in found if seconds is not None}

    def fastest(self) -> dict[int, frozenset[str]]:
        """Map each budget to the policies with the fastest plan: several if equally fast."""
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
    """Plan for every budget with every policy, and call `watch` with each row once it is done.

    `bound` adds the lower bound of each budget. Raises what `Comparison.rows` raises.
    """
    rows = []
    for row in comparison.rows(budgets, policies, bound=bound):
        rows.append(row)
        if watch is not None:
            watch(row)
    floor_bytes = comparison.budget_for(comparison.floor().floor.nbytes)
    peak_bytes = comparison.in_core_peak_bytes
    return Sweep(comparison.in_core.seconds, peak_bytes, floor_bytes, tuple(rows))
