"""conduct: what each call of a graph runs, and what is noted of it."""
