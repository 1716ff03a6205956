"""search: outcore's own planner: annealing over every gap, and finishing touches."""
