"""sweep: predict what policies do over a range of budgets (docs/sweep.md)."""

from outcore.report.style import check_plot
from outcore.sweep.budgets import FLOOR, BudgetRange
from outcore.sweep.drawing import plot
from outcore.sweep.table import Sweep, sweep

__all__ = ["FLOOR", "BudgetRange", "Sweep", "check_plot", "plot", "sweep"]
