"""gpu: benchmarks on a GPU: `python -m benchmarks.gpu [--only NAME...]`, see docs/gpu.md."""
