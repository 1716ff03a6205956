"""sweep: policies over a range of budgets, predicted (docs/sweep.md)."""

from outcore.sweep.budgets import FLOOR, BudgetRange
from outcore.sweep.drawing import check_plot, plot
from outcore.sweep.table import Sweep, sweep

__all__ = ["FLOOR", "BudgetRange", "Sweep", "check_plot", "plot", "sweep"]
