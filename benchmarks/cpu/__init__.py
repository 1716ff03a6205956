"""cpu: benchmarks on a CPU: `python -m benchmarks.cpu [--only NAME...]`, see docs/benchmarks.md."""
