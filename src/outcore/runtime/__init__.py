"""runtime: a captured graph from its first profiled step to its planned ones."""
