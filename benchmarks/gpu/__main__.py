"""The command `python -m benchmarks.gpu`."""

from __future__ import annotations

# Worker processes import this module under another name: they must not load the benchmarks.
if __name__ == "__main__":
    from benchmarks.gpu.command import main

    main()
