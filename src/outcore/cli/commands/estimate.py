"""outcore estimate: predict whether a training step of the user's script fits."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli.predicted import THIS_MACHINE, machine_of
from outcore.cli.targeted import traced_step
from outcore.units import format_bytes

if TYPE_CHECKING:
    from outcore.preflight.forecast import Forecast
    from outcore.preflight.step import Traced

EXIT_TOO_LARGE = 1
WIDTH = 17


def estimate(
    *,
    target: Annotated[
        str, typer.Argument(help="path/to/script.py:function or package.module:function.")
    ],
    budget: Annotated[
        str, typer.Option(help="Device memory (12GiB, 80% of the machine's).")
    ] = "100%",
    hardware: Annotated[str, typer.Option(help="A machine of `outcore hardware`.")] = THIS_MACHINE,
    policy: Annotated[str, typer.Option(help="A spec, such as pooch{early=true}.")] = "search",
    states: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Optimizer state, in copies of the weights (SGD with momentum 1, Adam 2).",
        ),
    ] = 1,
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="Build the model and its inputs with real tensors (needs their memory)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Predict whether a training step fits, and how much slower it gets. Nothing is trained.

    The function takes no arguments and returns (model, inputs), (model, inputs, loss_fn) or
    (function, inputs). Exit code 0: it fits, by a plan or as it is; 1: no plan fits; 2: an error.
    """
    from outcore.compare import read_budget  # noqa: PLC0415 - loads numpy
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others
    from outcore.policies import resolve  # noqa: PLC0415 - loads numpy
    from outcore.preflight.forecast import forecast, weight_bytes  # noqa: PLC0415 - loads numpy

    wanted, machine = resolve(policy), machine_of(hardware)
    nbytes = read_budget("--budget", budget, machine.hardware.capacity(Tier.DEVICE))
    shown = escape(target)
    with Console(stderr=True).status(f"{shown}: tracing") as status, redirect_stdout(sys.stderr):
        step = traced_step(target, real=real)
        status.update(f"{shown}: planning")
        outside = states * weight_bytes(step.trace)
        found = forecast(step.trace, machine, nbytes, wanted, outside, step.unused_bytes)
    if as_json:
        typer.echo(json.dumps({"target": target, **found.to_dict(), "note": step.note}, indent=1))
    else:
        _print(target, found, step, states, machine.hardware.capacity(Tier.DEVICE))
    if not found.fits:
        raise typer.Exit(EXIT_TOO_LARGE)


def _print(target: str, found: Forecast, step: Traced, states: int, capacity_bytes: int) -> None:
    from outcore.preflight.words import rows, verdict, what_to_do  # noqa: PLC0415 - loads numpy

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{target} on {found.hardware} (all predicted)")
    say(verdict(found))
    for name, text in rows(found):
        say(f"{name:<{WIDTH}}{text}")
    copies = "1 copy" if states == 1 else f"{states} copies"
    held = format_bytes(found.optimizer_bytes)
    say(f"{'optimizer':<{WIDTH}}{copies} of the weights ({held}); change this with --states")
    if step.note:
        say(f"{'in training':<{WIDTH}}{step.note}")
    if not found.fits_in_core:
        name, text = what_to_do(found, capacity_bytes)
        say(f"{name:<{WIDTH}}{text}")
