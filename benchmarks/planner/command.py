"""command: the command line of the planner benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from benchmarks.kit.benchmark import Benchmark
from benchmarks.kit.command import Kit, run_kit
from benchmarks.kit.machine import host
from benchmarks.planner.cells import budgets, papers
from benchmarks.planner.measured import measured
from benchmarks.planner.monotone import monotone
from benchmarks.planner.speed import speed
from benchmarks.reproduction.steps import Scale

_ROWS: tuple[Benchmark[Scale], ...] = (
    Benchmark("papers", "ResNet-50 on the papers' machines", papers),
    Benchmark("measured", "a step that was measured on a GPU, under four budgets", measured),
    Benchmark("speed", "how long search takes, and what a minute of it would gain", speed),
    Benchmark("budgets", "networks at a half, a third and a quarter of their memory", budgets),
    Benchmark("monotone", "whether more memory or a faster link ever costs time", monotone),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names, or all."""
    run_kit(
        Kit(
            name="planner",
            description="search, the bound below it and the other policies, on modeled hardware.",
            benchmarks=MappingProxyType({row.name: row for row in _ROWS}),
            scale=lambda given: Scale(small=given.small),
            machine=lambda _: host(),  # steps are modeled; planning times are this machine's
        ),
        arguments,
    )
