"""subject: the training step that a command predicts: a known network's, or that of a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.status import Status

from outcore.cli.predicted import THIS_MACHINE, machine_of
from outcore.errors import OptionValueError

if TYPE_CHECKING:
    from outcore.allocators import Allocator
    from outcore.compare import Comparison
    from outcore.preflight.step import Traced
    from outcore.presets import Preset

NETWORK, BATCH, MACHINE, STATES = "resnet50", 256, "v100-pcie3", 1
"""Defaults of the options; for a script the machine is `THIS_MACHINE`."""

MOST_SAMPLES = 2**24
"""All tensors of a network's step then still have fewer than 2**63 bytes together."""

_SHOWN_MACHINE = f"{MACHINE}, and for a script {THIS_MACHINE}"

Target = Annotated[
    str | None,
    typer.Argument(
        help="path/to/script.py:function, as for `outcore estimate`, instead of --network.",
        show_default=False,
    ),
]
Network = Annotated[
    str | None,
    typer.Option("--network", help="A network of `outcore networks`.", show_default=NETWORK),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", min=1, max=MOST_SAMPLES, help="Samples.", show_default=str(BATCH)),
]
Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        min=1,
        max=MOST_SAMPLES,
        help="Samples; may be given several times.",
        show_default=str(BATCH),
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        "--hardware", help="A machine of `outcore hardware`.", show_default=_SHOWN_MACHINE
    ),
]
Budget = Annotated[
    str, typer.Option("--budget", help="Device memory (16GiB, 80% of the machine's).")
]
States = Annotated[
    int | None,
    typer.Option(
        "--states",
        min=0,
        help="For a script: optimizer state, in copies of the weights (Adam 2).",
        show_default=str(STATES),
    ),
]
Real = Annotated[
    bool,
    typer.Option(
        "--real", help="For a script: build its model with real tensors (needs their memory)."
    ),
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A training step on a machine, both looked up but not traced yet."""

    title: str
    """What is trained: the network and its batch size, or the target as the user wrote it."""
    machine: Preset
    trace: Callable[[], Traced]
    """Traces the step under fake tensors. Raises TargetError if a script's step cannot be."""
    samples: int | None = None
    """None for a script, which does not say how many samples its step has."""
    states: int = STATES

    @property
    def on_machine(self) -> str:
        """The title and the machine, as text."""
        return f"{self.title}, on {self.machine.hardware.name}"

    @property
    def key(self) -> dict[str, Any]:
        """What tells apart the rows of several steps, for programs."""
        return {"target": self.title} if self.samples is None else {"batch": self.samples}

    def traced(self, status: Status) -> Traced:
        """The step's trace. What a script prints goes to standard error."""
        status.update(escape(f"{self.title}: tracing"))
        with redirect_stdout(sys.stderr):
            return self.trace()

    def comparison(
        self, traced: Traced, *, allocator: Allocator | None = None, variants: bool = False
    ) -> Comparison:
        """What policies are asked about, with times by the machine's roofline.

        A script's plans leave free what they leave free in training; a network's do not, like
        those of the papers.
        """
        from outcore.compare import Comparison  # noqa: PLC0415 - loads numpy

        return Comparison(
            traced.trace,
            self.machine,
            self.samples or 1,
            self.states,
            allocator,
            variants=variants,
            margin=self.samples is None,
            unused_bytes=traced.unused_bytes,
        )

    def traced_comparison(
        self, status: Status, *, allocator: Allocator | None = None, variants: bool = False
    ) -> Comparison:
        """Both at once; how training would differ from the trace is told on standard error."""
        traced = self.traced(status)
        if traced.note:
            line = f"{self.title}: {traced.note}"
            status.console.print(line, highlight=False, markup=False, soft_wrap=True)
        return self.comparison(traced, allocator=allocator, variants=variants)

    def budget_bytes(self, text: str) -> int:
        """The value of `--budget`; percentages are of the machine's memory. Raises BudgetError."""
        from outcore.compare import read_budget  # noqa: PLC0415 - loads numpy
        from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others

        return read_budget("--budget", text, self.machine.hardware.capacity(Tier.DEVICE))


def subject(
    target: str | None,
    network: str | None,
    batch: int | None,
    hardware: str | None,
    states: int | None,
    *,
    real: bool,
) -> Subject:
    """Look up one step; None stands for an option's default. Raises OptionValueError."""
    batches = None if batch is None else [batch]
    (found,) = subjects(target, network, batches, hardware, states, real=real)
    return found


def subjects(
    target: str | None,
    network: str | None,
    batches: Sequence[int] | None,
    hardware: str | None,
    states: int | None,
    *,
    real: bool,
) -> list[Subject]:
    """A step for each batch size, or the script's. Raises OptionValueError before any long work."""
    _check_one_step(target, network, batches, states, real=real)
    if target is not None:
        return [_scripted(target, hardware, states, real=real)]
    from outcore.networks import network as named  # noqa: PLC0415 - loads torch

    name = NETWORK if network is None else network
    machine = machine_of(MACHINE if hardware is None else hardware)
    spec = named(name)

    def of(samples: int) -> Subject:
        def trace() -> Traced:
            from outcore.capture import trace_network  # noqa: PLC0415 - loads torch
            from outcore.preflight.step import Traced  # noqa: PLC0415 - with the others

            return Traced(trace_network(spec, samples))

        return Subject(f"{name}, batch {samples}", machine, trace, samples)

    return [of(samples) for samples in batches or (BATCH,)]


def _scripted(target: str, hardware: str | None, states: int | None, *, real: bool) -> Subject:
    def trace() -> Traced:
        from outcore.cli.targeted import traced_step  # noqa: PLC0415 - loads torch

        return traced_step(target, real=real)

    machine = machine_of(THIS_MACHINE if hardware is None else hardware)
    return Subject(target, machine, trace, states=STATES if states is None else states)


def _check_one_step(
    target: str | None,
    network: str | None,
    batches: Sequence[int] | None,
    states: int | None,
    *,
    real: bool,
) -> None:
    """Raise OptionValueError for network options given with a script, and the other way round."""
    if target is None:
        reason = "it is for a script: name one, as path/to/script.py:function"
        others: tuple[tuple[str, object], ...] = (("--states", states), ("--real", real or None))
    else:
        reason = f"{target} says what is trained: leave one of the two out"
        batch = batches[0] if batches else None
        others = ("--network", network), ("--batch", batch)
    for option, value in others:
        if value is not None:
            raise OptionValueError(option=option, value=value, reason=reason)
