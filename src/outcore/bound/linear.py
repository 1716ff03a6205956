"""LinearProgram: build a linear program row by row, solve it, and prove a bound from its duals.

HiGHS solves to a tolerance, and the bound must not depend on that. By weak duality any duals,
however rough, prove a bound; this proved value is what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

import numpy as np

from outcore.errors import MissingPackageError

Terms: TypeAlias = list[tuple[int, float]]
"""Columns with their factors. A column may occur twice."""

_OPTIMAL, _INFEASIBLE = 0, 2
"""Statuses that scipy's `linprog` returns."""


def times(terms: Terms, factor: float) -> Terms:
    """Every term, times `factor`."""
    return [(column, factor * old) for column, old in terms]


@dataclass(frozen=True, slots=True)
class Solution:
    """`infeasible`: the solver found that no point satisfies all rows.

    `proved`: no point costs less than this; 0 if no duals were found. `duals`: one per `at_most`.
    """

    infeasible: bool
    proved: float = 0.0
    duals: tuple[float, ...] = ()


@dataclass(slots=True)
class _Rows:
    """Sparse rows with their right-hand sides."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, terms: Terms, right: float) -> int:
        row = len(self.right)
        for column, factor in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.factors.append(factor)
        self.right.append(right)
        return row


class LinearProgram:
    """Minimize the sum of costs. Every variable is at least 0."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.below, self.equal = _Rows(), _Rows()

    def variable(self, upper: float = inf, cost: float = 0.0) -> int:
        """A new column. If `upper` is infinite, `cost` must be positive."""
        self.uppers.append(upper)
        self.costs.append(cost)
        return len(self.costs) - 1

    def at_most(self, terms: Terms, right: float = 0.0) -> int:
        """Add the row: the sum of `terms` is at most `right`."""
        return self.below.add(terms, right)

    def sum_of(self, terms: Terms, upper: float) -> int:
        """A new column that equals the sum of `terms`, between 0 and `upper`."""
        column = self.variable(upper)
        self.equal.add([(column, -1.0), *terms], 0.0)
        return column

    def solve(self) -> Solution:
        """Solve it. Raises MissingPackageError if scipy is not installed."""
        try:
            from scipy.optimize import linprog  # noqa: PLC0415 - scipy is an extra
        except ImportError as error:
            raise MissingPackageError(
                package="scipy", extra="plan", purpose="the lower bound needs a solver"
            ) from error
        below, equal = self._matrix(self.below), self._matrix(self.equal)
        found: Any = linprog(
            self.costs,
            A_ub=below,
            b_ub=self.below.right,
            A_eq=equal,
            b_eq=self.equal.right,
            bounds=np.column_stack((np.zeros(len(self.uppers)), self.uppers)),
            method="highs-ipm",
        )
        if found.status != _OPTIMAL:
            return Solution(infeasible=found.status == _INFEASIBLE)
        duals = np.minimum(found.ineqlin.marginals, 0.0)
        reduced = np.asarray(self.costs) - below.T @ duals - equal.T @ found.eqlin.marginals
        value = duals @ self.below.right  # all rows of `equal` have 0 on the right
        return Solution(False, self._proved(float(value), reduced), tuple(duals))

    def _proved(self, value: float, reduced: Any) -> float:
        """The least cost that `reduced` costs allow, at the best corner of the variables' bounds.

        A variable without an upper bound has a cost. If its reduced cost is as low as -e times its
        cost, the total cost C is at least value - e C.
        """
        uppers, costs = np.asarray(self.uppers), np.asarray(self.costs)
        finite = np.isfinite(uppers)
        value += float(np.minimum(reduced[finite], 0.0) @ uppers[finite])
        slack = float(np.max(-reduced[~finite] / costs[~finite], initial=0.0))
        return max(0.0, value / (1 + slack))

    def _matrix(self, rows: _Rows) -> Any:
        from scipy.sparse import csr_array  # noqa: PLC0415 - as above

        shape = (len(rows.right), len(self.costs))
        return csr_array((rows.factors, (rows.rows, rows.columns)), shape=shape)
