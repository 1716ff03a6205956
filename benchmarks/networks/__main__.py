"""The command `python -m benchmarks.networks [NAME...]`."""

from benchmarks.networks.command import main

main()
