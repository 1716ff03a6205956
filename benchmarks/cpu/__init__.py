"""Benchmarks on a CPU: `python -m benchmarks.cpu [NAME...]`, see docs/benchmarks.md."""
