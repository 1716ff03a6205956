"""outcore plan make: plan a step for a machine that need not be here, and save the plan."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outcore import __version__
from outcore.cli.search_status import reporting_search
from outcore.cli.subject import Batch, Budget, Machine, Network, Real, States, Target, subject
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.ir.plan import Plan
    from outcore.ir.problem import Problem
    from outcore.planfile import Rule
    from outcore.policies import Policy


def make(  # noqa: PLR0913 - a command has as many arguments as options
    target: Target = None,
    *,
    network: Network = None,
    batch: Batch = None,
    hardware: Machine = None,
    budget: Budget = "100%",
    policy: Annotated[str, typer.Option(help="A spec, such as pooch{early=true}.")] = "search",
    overrides: Annotated[
        Path | None, typer.Option(help="A file of rules that override the policy.")
    ] = None,
    reasons: Annotated[
        int | None,
        typer.Option(min=1, help="Explain only the N moves that free most (default: all)."),
    ] = None,
    states: States = None,
    real: Real = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file (default, or -: standard output)."),
    ] = None,
) -> None:
    """Plan a training step for any known machine, and write the plan to a file."""
    from outcore.planfile import (  # noqa: PLC0415 - loads numpy
        Versions,
        file_text,
        load_overrides,
        make_file,
        save_plans,
        saved_plan,
    )
    from outcore.policies import resolve  # noqa: PLC0415 - loads numpy
    from outcore.report.place import check_file, writing  # noqa: PLC0415 - loads numpy

    wanted, step = resolve(policy), subject(target, network, batch, hardware, states, real=real)
    nbytes, shown = step.budget_bytes(budget), escape(step.title)
    if str(output) == "-":
        output = None
    if output is not None:
        check_file("--output", output)
    rules = () if overrides is None else load_overrides(overrides)
    with Console(stderr=True).status(shown) as status, reporting_search(status, step.title):
        comparison = step.traced_comparison(status)
        problem = comparison.problem(nbytes)
        status.update(f"{shown}: planning")
        with comparison.naming_budgets(nbytes):
            found = _plan(problem, wanted, rules)
        status.update(f"{shown}: looking for reasons")
        saved = saved_plan(problem, found, most=reasons)
    versions = Versions(__version__, platform.python_version(), version("torch"))
    file = make_file([saved], versions, rules)
    if output is None:
        typer.echo(file_text(file), nl=False)
    else:
        with writing("--output", output):
            save_plans(file, output)
        peak, seconds = saved.predicted.device_bytes, saved.predicted.seconds
        line = (
            f"{output}: {format_bytes(peak)} at most, {format_seconds(seconds)} a step (predicted)"
        )
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _plan(problem: Problem, policy: Policy, rules: tuple[Rule, ...]) -> Plan:
    from outcore.planfile import Overridden, check_rules  # noqa: PLC0415 - loads numpy
    from outcore.policies import ask  # noqa: PLC0415 - as above

    check_rules(rules, [problem.trace])
    return Overridden(policy, rules).plan(problem) if rules else ask(policy, problem)
