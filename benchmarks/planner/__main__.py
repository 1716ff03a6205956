"""The command `python -m benchmarks.planner`."""

from benchmarks.planner.command import main

main()
