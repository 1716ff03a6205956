"""outcore report: a policy's plan as figures, as a page, and as files for viewers, predicted."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from outcore.cli.modelled import Batch, Budget, Machine, Modelled, Network, modelled
from outcore.cli.predicted import has_solver
from outcore.cli.told import told
from outcore.errors import OptionValueError

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.policies import Policy
    from outcore.report import Report
    from outcore.sweep import Sweep

BESIDE = ("superneurons", "chen-sqrt", "swap-all")
"""Policies that a sweep shows beside the one that is asked for; they take no time."""


def report(  # noqa: PLR0913 - a command has as many arguments as options
    *,
    network: Network = "resnet50",
    batch: Batch = 128,
    hardware: Machine = "v100-pcie3",
    budget: Budget = "100%",
    policy: Annotated[str, typer.Option(help="A spec, such as pooch{early=true}.")] = "search",
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write JSON for Perfetto (ui.perfetto.dev).")
    ] = None,
    memory_snapshot: Annotated[
        Path | None, typer.Option(help="Write a pickle for pytorch.org/memory_viz.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw it into this .png, .pdf or .svg file.")
    ] = None,
    with_sweep: Annotated[
        bool, typer.Option("--sweep", help="With what other budgets take, on the page.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="How many budgets --sweep has.")] = 6,
    bound: Annotated[bool, typer.Option(help="The least time of any plan.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Plan a training step, simulate it, and show where its time and memory go."""
    from outcore.policies import resolve  # noqa: PLC0415 - loads numpy
    from outcore.report.style import check_plot  # noqa: PLC0415 - with the others

    wanted, step = resolve(policy), modelled(network, batch, hardware, budget)
    for option, file in (
        ("--html", html),
        ("--chrome-trace", chrome_trace),
        ("--memory-snapshot", memory_snapshot),
    ):
        _check_folder(option, file)
    if plot_file is not None:
        check_plot(plot_file)
    progress = Console(stderr=True)
    bound = bound and has_solver(progress)
    with progress.status(step.title) as status, told(status, step.title):
        comparison = step.comparison(status)
        own = step.budget_bytes
        swept = _sweep(comparison, wanted, own, steps, status, bound=bound) if with_sweep else None
        found = _report(step, comparison, wanted, status, bound=bound, swept=swept)
        status.update(f"{step.title}: writing")
        files = (
            (html, found.to_html),
            (chrome_trace, found.to_chrome_trace),
            (memory_snapshot, found.to_memory_snapshot),
            (plot_file, found.to_plot),
        )
        for file, write in files:
            if file is not None:
                write(file)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        Console().print(str(found), highlight=False, markup=False, soft_wrap=True)
    for file, _ in files:
        if file is not None:
            progress.print(f"written: {file}", highlight=False, markup=False, soft_wrap=True)


def _report(
    step: Modelled,
    comparison: Comparison,
    policy: Policy,
    status: Status,
    *,
    bound: bool,
    swept: Sweep | None,
) -> Report:
    """Plan, and see what that takes. Raises InfeasibleError where no plan fits."""
    from outcore.report import report as reported  # noqa: PLC0415 - loads numpy

    status.update(f"{step.title}: planning")
    problem = comparison.problem(step.budget_bytes)
    start = time.perf_counter()
    plan = policy.plan(problem)
    seconds = time.perf_counter() - start
    status.update(f"{step.title}: looking for the least time of any plan")
    return reported(
        problem,
        plan,
        title=f"{step.title}, on {step.machine.hardware.name}",
        planning_seconds=seconds,
        lower_bound_seconds=comparison.bound_seconds(step.budget_bytes) if bound else None,
        sweep=swept,
    )


def _sweep(
    comparison: Comparison,
    policy: Policy,
    own_bytes: int,
    steps: int,
    status: Status,
    *,
    bound: bool,
) -> Sweep:
    """What `policy` and some others make of budgets from the floor to the in-core peak.

    The report's own budget is one of them.
    """
    from outcore.policies import resolve, spec_text  # noqa: PLC0415 - loads numpy
    from outcore.sweep import BudgetRange, sweep  # noqa: PLC0415 - loads numpy

    specs = [spec_text(policy), *(name for name in BESIDE if name != policy.name)]
    budgets = list(BudgetRange(steps=steps).budgets(comparison))
    if budgets[0] < own_bytes < budgets[-1]:
        budgets = sorted({*budgets, own_bytes})
    numbers = {budget: number for number, budget in enumerate(budgets, 1)}
    return sweep(
        comparison,
        budgets,
        [resolve(spec) for spec in specs],
        bound=bound,
        watch=lambda row: status.update(
            f"budget {numbers[row.budget_bytes]} of {len(budgets)}: {row.policy} done"
        ),
    )


def _check_folder(option: str, file: Path | None) -> None:
    """Raise OptionValueError, before minutes of planning, for a file in no folder."""
    if file is not None and not file.parent.is_dir():
        reason = f"there is no folder {str(file.parent)!r}"
        raise OptionValueError(option=option, value=str(file), reason=reason)
