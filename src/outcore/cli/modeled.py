"""modeled: turn the options for a network and a machine known by name into a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.status import Status

from outcore.cli.predicted import machine_of

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.ir.problem import Problem
    from outcore.networks import NetworkSpec
    from outcore.presets import Preset

Network = Annotated[str, typer.Option("--network", help="A network of `outcore networks`.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples.")]
Machine = Annotated[str, typer.Option("--hardware", help="A machine of `outcore hardware`.")]
Budget = Annotated[
    str, typer.Option("--budget", help="Device memory (16GiB, 80% of the machine's).")
]


@dataclass(frozen=True, slots=True)
class Modeled:
    """A network and a machine, looked up but not traced yet."""

    network: str
    batch: int
    step: NetworkSpec
    machine: Preset
    budget_bytes: int

    @property
    def title(self) -> str:
        """The network and the batch size, as text."""
        return f"{self.network}, batch {self.batch}"

    def problem(self, status: Status) -> Problem:
        """Trace the network under fake tensors, and estimate the times of its ops."""
        return self.comparison(status).problem(self.budget_bytes)

    def comparison(self, status: Status) -> Comparison:
        """The same as `problem`, for any budget."""
        from outcore.capture import trace_network  # noqa: PLC0415 - loads torch
        from outcore.compare import Comparison  # noqa: PLC0415 - loads numpy

        status.update(f"{self.title}: tracing")
        trace = trace_network(self.step, self.batch)
        return Comparison(trace, self.machine, self.batch)


def modeled(network: str, batch: int, hardware: str, budget: str) -> Modeled:
    """Look up all names. Raises OptionValueError or BudgetError before any long work starts."""
    from outcore.compare import read_budget  # noqa: PLC0415 - loads numpy
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others
    from outcore.networks import network as named  # noqa: PLC0415 - loads torch

    machine = machine_of(hardware)
    nbytes = read_budget("--budget", budget, machine.hardware.capacity(Tier.DEVICE))
    return Modeled(network, batch, named(network), machine, nbytes)
