"""command: the command line of the CPU benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cpu.machine import machine
from benchmarks.cpu.scale import FULL, SMALL
from benchmarks.cpu.table import BENCHMARKS
from benchmarks.kit.command import Kit, run_kit

KIT = Kit(
    name="cpu",
    description="Measure outcore on this machine's CPU; it should have nothing else to do.",
    benchmarks=BENCHMARKS,
    scale=lambda given: SMALL if given.small else FULL,
    machine=lambda _: machine(),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names."""
    run_kit(KIT, arguments)
