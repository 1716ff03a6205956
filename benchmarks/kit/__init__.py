"""What the benchmarks share: rows, tables, result files, worker processes, turns, the command."""
