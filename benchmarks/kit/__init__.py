"""kit: what all benchmarks share: rows, tables, result files, worker processes, command line."""
