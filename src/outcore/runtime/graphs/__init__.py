"""graphs: one captured graph, from its first profiled step to its planned steps."""
