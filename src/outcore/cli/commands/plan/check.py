"""outcore plan check: check that a plan file is intact, and valid for a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli.predicted import THIS_MACHINE
from outcore.cli.saved import File, budget_of, plans_of
from outcore.cli.subject import BATCH, MACHINE, Real, States, subject
from outcore.errors import DigestError, InfeasibleError, OptionValueError, OutcoreError, VerifyError
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.ir.problem import Problem
    from outcore.planfile import PlanFile

EXIT_INVALID = 1


def check(  # noqa: PLR0913 - a command has as many arguments as options
    file: File,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Also check it against the step of path/to/script.py:function.",
            show_default=False,
        ),
    ] = None,
    *,
    network: Annotated[
        str | None,
        typer.Option(help="Also check it against this network (default: the file alone)."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Samples per step (default: {BATCH}).")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help=f"A machine of `outcore hardware` (default: {MACHINE}, and for a script "
            f"{THIS_MACHINE})."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Device memory (default: the budget that it was made for).")
    ] = None,
    states: States = None,
    real: Real = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also require the same hardware and profile.")
    ] = False,
) -> None:
    """Check that a plan file is unchanged, and valid for a step on a machine.

    The step is traced again: the plan must match the trace, verify, and fit. Exit code 0:
    valid; 1: not valid; 2: a mistake in the call, or a file that cannot be read.
    """
    from outcore.planfile import load_plans  # noqa: PLC0415 - loads numpy

    options = {
        "--strict": strict or None,
        "--batch": batch,
        "--hardware": hardware,
        "--budget": budget,
        "--states": states,
        "--real": real or None,
    }
    alone = target is None and network is None
    for option, value in options.items() if alone else ():
        if value is not None:
            reason = "it needs a step to check against: name one with --network, or a script's"
            raise OptionValueError(option=option, value=value, reason=reason)
    try:
        found = load_plans(file)
        several = (
            f"{len(found.plans)} plans, unchanged since they were"
            if len(found.plans) > 1
            else "a plan, unchanged since it was"
        )
        told = f"{file}: {several} saved"
        if not alone:
            step = subject(target, network, batch, hardware, states, real=real)
            nbytes = step.budget_bytes(budget_of(found) if budget is None else budget)
            with Console(stderr=True).status(escape(step.title)) as status:
                comparison = step.traced_comparison(status)
                with comparison.naming_budgets(nbytes):
                    problem = comparison.problem(nbytes)
                    told = f"{file}: {_checked(found, problem, str(file), strict=strict)}"
    except (DigestError, InfeasibleError, VerifyError) as error:
        _say_invalid(error)
        raise typer.Exit(EXIT_INVALID) from error
    Console().print(told, highlight=False, markup=False, soft_wrap=True)


def _checked(file: PlanFile, problem: Problem, name: str, *, strict: bool) -> str:
    """The predicted peak and step time of the file's plans for `problem`, as text.

    Several plans can be for the same trace; the text then has the largest of their figures.
    Raises DigestError, VerifyError or InfeasibleError for the first plan that is not valid.
    """
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others
    from outcore.lower import lower  # noqa: PLC0415 - loads more
    from outcore.planfile import check_plan  # noqa: PLC0415 - loads numpy
    from outcore.simulate import simulate  # noqa: PLC0415 - with the others

    plans = [
        check_plan(saved, problem, strict=strict, name=name) for saved in plans_of(file, problem)
    ]
    timelines = [simulate(problem, lower(problem, plan, fast=True)) for plan in plans]
    peak, budget = max(t.peak(Tier.DEVICE) for t in timelines), problem.budget_bytes
    seconds = max(timeline.seconds for timeline in timelines)
    what = "the plan verifies" if len(plans) == 1 else f"{len(plans)} plans for it verify"
    fits = "fits" if len(plans) == 1 else "fit"
    return (
        f"{what} and {fits}: {format_bytes(peak)} of {format_bytes(budget)}, "
        f"{format_seconds(seconds)} a step (predicted)"
    )


def _say_invalid(error: OutcoreError) -> None:
    console = Console(stderr=True)
    console.print(f"not valid: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
