"""budget: what the graphs of one budget share, and how they make room for each other."""
