"""limits: how much memory this process may use."""
