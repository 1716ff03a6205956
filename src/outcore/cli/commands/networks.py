"""outcore networks: list the networks known by name, and what a step of each needs."""

from __future__ import annotations

from rich.table import Table

from outcore.cli.screen import screen
from outcore.units import format_bytes, format_count


def networks() -> None:
    """List the networks with parameters, and GFLOP and bytes saved for backward per sample."""
    from outcore.networks import NETWORKS, figures  # noqa: PLC0415 - loads torch

    found = figures()
    table = Table("network", "what it is")
    for heading in ("parameters", "saved / sample", "GFLOP / sample"):
        table.add_column(heading, justify="right")
    for name, spec in NETWORKS.items():
        took = found[name]
        table.add_row(
            name,
            spec.summary,
            format_count(took.parameters),
            format_bytes(took.saved_bytes),
            f"{took.flop / 1e9:.4g}",
        )
    screen().print(table)
