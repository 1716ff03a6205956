"""Calls of graphs with several results, of which some may get no gradient."""
