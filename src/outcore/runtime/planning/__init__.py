"""planning: make the plan of one graph, and the programs of its calls without a plan."""
