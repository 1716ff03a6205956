"""outcore sweep: simulate policies over a range of budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.predicted import (
    NOTHING,
    check_one_form,
    has_solver,
    policies_of,
    print_rows,
    tell_broken,
)
from outcore.cli.screen import screen
from outcore.cli.search_status import reporting_search
from outcore.cli.subject import Batch, Machine, Network, Real, States, Target, subject
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.compare import Compared
    from outcore.sweep import Sweep

USUAL = "search;pooch{early=true};superneurons;chen-sqrt;swap-all"
BEST = "*"
COLUMN_WIDTH, OTHER_WIDTH = 10, 22
"""Characters of one policy's column, and of the two other columns together."""


def sweep(  # noqa: PLR0913 - a command has as many arguments as options
    target: Target = None,
    *,
    network: Network = None,
    batch: Batch = None,
    hardware: Machine = None,
    start: Annotated[
        str,
        typer.Option("--from", help="Smallest budget: 4GiB, 30% of the in-core peak, or floor."),
    ] = "floor",
    stop: Annotated[
        str | None,
        typer.Option(
            "--to", help="Largest budget (default: the in-core peak, or all of the machine)."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="How many budgets, evenly spaced.")] = 8,
    policies: Annotated[
        str, typer.Option(help="Specs, separated by commas or semicolons, or all.")
    ] = USUAL,
    states: States = None,
    real: Real = False,
    bound: Annotated[
        bool, typer.Option(help="Also compute a lower bound on the time of any plan.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw a chart into this .png, .pdf or .svg file.")
    ] = None,
) -> None:
    """Plan a training step for evenly spaced budgets, and simulate each plan.

    Percentages are of the in-core peak: what the step holds with everything kept on the device.
    """
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others
    from outcore.report.place import writing  # noqa: PLC0415 - loads numpy
    from outcore.sweep import BudgetRange, check_plot, plot  # noqa: PLC0415 - loads numpy
    from outcore.sweep import sweep as sweep_budgets  # noqa: PLC0415 - loads numpy

    check_one_form(as_json=as_json, as_csv=as_csv)
    step = subject(target, network, batch, hardware, states, real=real)
    wanted = BudgetRange(start, stop, steps)
    wanted.check(step.machine.hardware.capacity(Tier.DEVICE))  # fail early, before tracing
    specs, broken = policies_of(policies)
    if plot_file is not None:
        check_plot(plot_file)
    progress = Console(stderr=True)
    bound = bound and has_solver(progress)
    what = escape(step.title)
    with progress.status(what) as status, reporting_search(status, step.title):
        comparison = step.traced_comparison(status)
        budgets = wanted.budgets(comparison)

        def watch(row: Compared) -> None:
            done = budgets.index(row.budget_bytes) + 1
            status.update(f"{what}, budget {done} of {len(budgets)}: {row.policy} done")

        found = sweep_budgets(comparison, budgets, specs, bound=bound, watch=watch)
    title = _title(step.on_machine, found)
    if plot_file is not None:
        with writing("--plot", plot_file):
            plot(found, title, plot_file)
        progress.print(f"drawn: {plot_file}", highlight=False, markup=False, soft_wrap=True)
    rows = [{**step.key, **row.to_dict()} for row in found.rows]
    print_rows(rows, as_json=as_json, as_csv=as_csv)
    if not (as_json or as_csv):
        console = screen()
        console.print(title, highlight=False, markup=False, soft_wrap=True)
        for shown in _shares(found.policies, console.width):
            console.print(_table(found, shown, bound=bound))
        note = f"{BEST} the fastest; {NOTHING} no plan; percentages are of the in-core peak"
        console.print(note, highlight=False, soft_wrap=True)
    tell_broken([*broken, *(row.reason for row in found.rows if row.failed)])


def _title(what: str, found: Sweep) -> str:
    """The title, in two lines."""
    peak, lowest = map(format_bytes, (found.in_core_peak_bytes, found.floor_bytes))
    in_core = format_seconds(found.in_core_seconds)
    return f"{what} (all predicted)\nin-core {in_core} in {peak}, floor {lowest}"


def _shares(policies: Sequence[str], width: int) -> Iterator[Sequence[str]]:
    """Split the policies evenly over as few tables as fit the console's width."""
    most = max(1, (width - OTHER_WIDTH) // COLUMN_WIDTH)
    size = ceil(len(policies) / ceil(len(policies) / most))
    yield from (policies[i : i + size] for i in range(0, len(policies), size))


def _table(found: Sweep, policies: Sequence[str], *, bound: bool) -> Table:
    """One row per budget; each cell has two lines, the step time and its ratio to in-core."""
    columns = [Column(name, justify="right", overflow="fold") for name in policies]
    table = Table(Column("budget", justify="right", no_wrap=True), *columns, show_lines=True)
    bounds, fastest = found.bounds(), found.fastest()
    if bound:
        table.add_column("any plan at least", justify="right")
    for budget in found.budgets:
        cells = [
            _cell(found, found.cells[budget, policy].seconds, best=policy in fastest[budget])
            for policy in policies
        ]
        if bound:
            cells.append(_cell(found, bounds.get(budget)))
        peak = found.in_core_peak_bytes
        share = f"\n{budget / peak:.1%}" if peak else ""
        table.add_row(f"{format_bytes(budget)}{share}", *cells)
    return table


def _cell(found: Sweep, seconds: float | None, *, best: bool = False) -> str:
    if seconds is None:
        return NOTHING
    slowdown = found.slowdown(seconds)
    times = "" if slowdown is None else f"\n{slowdown:.3f}x"
    text = f"{BEST * best}{format_seconds(seconds)}{times}"
    return f"[bold]{text}[/bold]" if best else text
