"""lms: LMS: swaps that are inserted into the graph, tuned by replaying it."""
