"""outcore report: show a policy's plan as figures, as a page and as files for viewers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from outcore.cli.predicted import has_solver
from outcore.cli.saved import budget_of, plan_of
from outcore.cli.search_status import reporting_search
from outcore.cli.subject import (
    Batch,
    Machine,
    Network,
    Real,
    States,
    Subject,
    Target,
    subject,
)
from outcore.errors import OptionValueError

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.ir.plan import Plan
    from outcore.ir.problem import Problem
    from outcore.planfile import PlanFile
    from outcore.policies import Policy
    from outcore.report import Report
    from outcore.sweep import Sweep

BESIDE = ("superneurons", "chen-sqrt", "swap-all")
"""Policies that a sweep adds to the user's, for comparison; they plan fast."""
POLICY, WHOLE = "search", "100%"
"""Defaults of the options."""


def report(  # noqa: PLR0913 - a command has as many arguments as options
    target: Target = None,
    *,
    network: Network = None,
    batch: Batch = None,
    hardware: Machine = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory (16GiB, 80% of the machine's).",
            show_default=f"{WHOLE}, and with --plan the plan's",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="A spec, such as pooch{early=true}.", show_default=POLICY),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="Use this file of `outcore plan make` instead of planning."),
    ] = None,
    states: States = None,
    real: Real = False,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write JSON for Perfetto (ui.perfetto.dev).")
    ] = None,
    memory_snapshot: Annotated[
        Path | None, typer.Option(help="Write a pickle for pytorch.org/memory_viz.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw a chart into this .png, .pdf or .svg file.")
    ] = None,
    with_sweep: Annotated[
        bool, typer.Option("--sweep", help="Add a chart of other budgets to the page.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="How many budgets --sweep tries.")] = 6,
    bound: Annotated[
        bool, typer.Option(help="Also compute a lower bound on the time of any plan.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Plan a training step, simulate it, and show where its time and memory go.

    The step is that of a network, or of a script's function. Nothing is trained.
    """
    files = _Files(html, chrome_trace, memory_snapshot, plot_file)
    files.check()
    saved = None if plan_file is None else _load(plan_file, policy, with_sweep=with_sweep)
    wanted = _resolved(POLICY if policy is None else policy)
    step = subject(target, network, batch, hardware, states, real=real)
    known = WHOLE if saved is None else budget_of(saved)
    nbytes = step.budget_bytes(known if budget is None else budget)
    progress, shown = Console(stderr=True), escape(step.title)
    bound = bound and has_solver(progress)
    with progress.status(shown) as status, reporting_search(status, step.title):
        traced = step.traced(status)
        comparison, swept = step.comparison(traced), None
        if with_sweep:
            swept = _sweep(comparison, wanted, nbytes, steps, status, bound=bound)
        status.update(f"{shown}: planning")
        with comparison.naming_budgets(nbytes):
            planned = _planned(comparison.problem(nbytes), wanted, saved, str(plan_file))
        found = _report(step, comparison, planned, status, bound=bound, swept=swept)
        found = replace(found, notes=(*found.notes, *filter(None, [traced.note])))
        status.update(f"{shown}: writing")
        files.write(found)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        Console().print(str(found), highlight=False, markup=False, soft_wrap=True)
    for _, file in files.given():
        progress.print(f"written: {file}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files to write, each None if it was not requested."""

    html: Path | None
    chrome_trace: Path | None
    memory_snapshot: Path | None
    plot: Path | None

    def given(self) -> list[tuple[str, Path]]:
        """Each option that was given, with its file."""
        each = (
            ("--html", self.html),
            ("--chrome-trace", self.chrome_trace),
            ("--memory-snapshot", self.memory_snapshot),
            ("--plot", self.plot),
        )
        return [(option, file) for option, file in each if file is not None]

    def check(self) -> None:
        """Raise OptionValueError for a file that cannot be written, before the long planning."""
        from outcore.report.place import check_apart, check_file  # noqa: PLC0415 - loads numpy
        from outcore.report.style import check_plot  # noqa: PLC0415 - with the others

        for option, file in self.given():
            check_file(option, file)
        check_apart(self.given())
        if self.plot is not None:
            check_plot(self.plot)

    def write(self, found: Report) -> None:
        """Write all files. Raises OptionValueError for a file that cannot be written."""
        from outcore.report.place import writing  # noqa: PLC0415 - loads numpy

        writers = {
            "--html": found.to_html,
            "--chrome-trace": found.to_chrome_trace,
            "--memory-snapshot": found.to_memory_snapshot,
            "--plot": found.to_plot,
        }
        for option, file in self.given():
            with writing(option, file):
                writers[option](file)


def _load(file: Path, policy: str | None, *, with_sweep: bool) -> PlanFile:
    """A plan file. Raises OptionValueError if `--policy` or `--sweep` is given with it."""
    from outcore.planfile import load_plans  # noqa: PLC0415 - loads numpy

    if policy is not None:
        reason = "--plan gives the plan already: leave one of the two out"
        raise OptionValueError(option="--policy", value=policy, reason=reason)
    if with_sweep:
        reason = "other budgets have other plans: use --policy instead of --plan"
        raise OptionValueError(option="--sweep", value=True, reason=reason)
    return load_plans(file)


def _resolved(spec: str) -> Policy:
    from outcore.policies import resolve  # noqa: PLC0415 - loads numpy

    return resolve(spec)


def _planned(
    problem: Problem, policy: Policy, saved: PlanFile | None, name: str
) -> tuple[Problem, Plan, float | None]:
    """The problem, its plan, and the seconds of planning; None for a plan from a file.

    Raises InfeasibleError if no plan fits; for a plan from a file, the errors of `plan_of`.
    """
    if saved is not None:
        return problem, plan_of(saved, problem, name), None
    from outcore.policies import ask  # noqa: PLC0415 - loads numpy

    start = time.perf_counter()
    plan = ask(policy, problem)
    return problem, plan, time.perf_counter() - start


def _report(
    step: Subject,
    comparison: Comparison,
    planned: tuple[Problem, Plan, float | None],
    status: Status,
    *,
    bound: bool,
    swept: Sweep | None,
) -> Report:
    from outcore.report import report as reported  # noqa: PLC0415 - loads numpy

    problem, plan, seconds = planned
    status.update(f"{escape(step.title)}: looking for the least time of any plan")
    return reported(
        problem,
        plan,
        title=step.on_machine,
        planning_seconds=seconds,
        lower_bound_seconds=comparison.bound_seconds(problem.budget_bytes) if bound else None,
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
    """A sweep of `policy` and `BESIDE` over budgets from the floor to the in-core peak.

    It includes the report's budget, `own_bytes`, if that lies in between.
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
