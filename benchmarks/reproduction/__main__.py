"""The command `python -m benchmarks.reproduction`."""

from benchmarks.reproduction.command import main

main()
