"""outcore explain: show why a policy's plan moves each tensor, and where its step waits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.screen import screen
from outcore.cli.search_status import reporting_search
from outcore.cli.subject import Batch, Budget, Machine, Network, Real, States, Target, subject
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.explain import Explanation, Move

SHOWN = 10
"""Rows of a table without `--top`."""


def explain(  # noqa: PLR0913 - a command has as many arguments as options
    target: Target = None,
    *,
    network: Network = None,
    batch: Batch = None,
    hardware: Machine = None,
    budget: Budget = "100%",
    policy: Annotated[str, typer.Option(help="A spec, such as pooch{early=true}.")] = "search",
    top: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many moves and waits (default: {SHOWN}, with --json all)."),
    ] = None,
    states: States = None,
    real: Real = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Show the alternatives for each buffer that a plan moves, and why its step waits."""
    from outcore.explain import explain as explained  # noqa: PLC0415 - loads numpy
    from outcore.policies import ask, resolve  # noqa: PLC0415 - loads numpy

    wanted = resolve(policy)
    step = subject(target, network, batch, hardware, states, real=real)
    nbytes, shown = step.budget_bytes(budget), escape(step.title)
    with Console(stderr=True).status(shown) as status, reporting_search(status, step.title):
        comparison = step.traced_comparison(status)
        problem = comparison.problem(nbytes)
        status.update(f"{shown}: planning")
        with comparison.naming_budgets(nbytes):
            plan = ask(wanted, problem)
        status.update(f"{shown}: explaining")
        found = explained(problem, plan, most=top if as_json else top or SHOWN)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        _print(f"{step.on_machine} (all predicted)", found, top or SHOWN)


def _print(title: str, found: Explanation, most: int) -> None:
    from outcore.explain import summary  # noqa: PLC0415 - loads numpy

    console = screen()
    for line in (title, *summary(found)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found.moves:
        console.print(_moves(found))
    if found.waits:
        console.print(_waits(found, most))


def _moves(found: Explanation) -> Table:
    """The buffers that are moved, and what each alternative would cost."""
    held = " or held for reruns" * bool(found.held)
    gaps = f"{found.moved + found.held} gaps that are moved{held}"
    shown = f"{len(found.moves)} of {gaps}, by bytes x idle time"
    table = Table(
        Column("what is moved", overflow="fold"),
        Column("bytes", justify="right"),
        Column("plan"),
        Column("otherwise", overflow="fold"),
        title=shown,
        title_justify="left",
        show_lines=True,
    )
    for move in found.moves:
        idle = format_seconds(move.idle_seconds)
        choice = f"{move.choice}\nfor reruns" if move.dead else move.choice
        plan = f"{choice}\nafter op {move.after}\nuntil op {move.before}\nidle {idle}"
        otherwise = "\n".join(move.reasons)
        table.add_row(escape(_origin(move)), format_bytes(move.nbytes), plan, escape(otherwise))
    return table


def _origin(move: Move) -> str:
    """A buffer's name and where it comes from, one per line."""
    named = f"{move.name} (buffer {move.buffer})".strip()
    made = "passed in" if move.op is None else f"op {move.op} {move.target}"
    return "\n".join(filter(None, (named, made, move.site)))


def _waits(found: Explanation, most: int) -> Table:
    """The `most` longest waits."""
    longest = sorted(found.waits, key=lambda wait: -wait.seconds)[:most]
    table = Table(
        Column("wait", justify="right"),
        Column("of the step", justify="right"),
        Column("for what, and why so long", overflow="fold"),
        title=f"{len(longest)} of {len(found.waits)} waits of compute, the longest first",
        title_justify="left",
    )
    for wait in longest:
        share = f"{wait.seconds / found.seconds:.1%}"
        table.add_row(format_seconds(wait.seconds), share, escape(wait.reason))
    return table
