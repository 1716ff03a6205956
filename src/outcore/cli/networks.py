"""outcore networks: what can be trained by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from outcore.units import format_count

if TYPE_CHECKING:
    from outcore.networks import NetworkSpec


def networks() -> None:
    """List the networks with their numbers of parameters."""
    from outcore.networks import NETWORKS  # noqa: PLC0415 - loads torch

    table = Table("network", "what it is")
    table.add_column("parameters", justify="right")
    for name, spec in NETWORKS.items():
        table.add_row(name, spec.summary, format_count(_parameters(spec)))
    Console().print(table)


def _parameters(spec: NetworkSpec) -> int:
    """Count on the meta device, where parameters take no memory."""
    import torch  # noqa: PLC0415 - takes seconds to load; only where it is used

    with torch.device("meta"):
        model = spec.build()
    return sum(parameter.numel() for parameter in model.parameters())
