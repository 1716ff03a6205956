"""limits: how much memory this process may use, and what plans leave free of it."""
