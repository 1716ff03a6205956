"""graphs: what is known of one captured graph: its profile, its plan, what its calls met."""
