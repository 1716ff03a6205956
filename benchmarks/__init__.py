"""benchmarks: the measurements behind what the documentation says (docs/benchmarks.md)."""
