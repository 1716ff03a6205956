"""window: Sony's out-of-core scheduler: a window over all variables."""
