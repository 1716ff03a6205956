"""outcore plan diff: show the differences between two plan files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.screen import screen
from outcore.cli.words import NONE, action_words, made_words, storage_words
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outcore.planfile import Change, PlanDiff, Storage

EXIT_DIFFERENT = 1


def diff(
    before: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another plan file.", show_default=False)],
    *,
    actions: Annotated[
        bool, typer.Option("--actions", help="Show only changed actions; ignore reasons and costs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object.")] = False,
) -> None:
    """Show the differences between two plan files.

    Exit code 0: nothing differs; 1: something does; 2: a file cannot be read.
    """
    from outcore.planfile import diff_files, load_plans  # noqa: PLC0415 - loads numpy

    found = diff_files(load_plans(before), load_plans(after))
    found = found.only_actions() if actions else found
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        console = screen()
        if found.figures:
            console.print(_figures("the files", found.figures))
        for number, plan in enumerate(found.plans, 1):
            _print(console, f"graph {number}", plan)
        if not found.differs:
            console.print("Nothing differs.")
    raise typer.Exit(EXIT_DIFFERENT if found.differs else 0)


def _print(console: Console, title: str, plan: PlanDiff) -> None:
    if plan.before is None or plan.after is None:
        where = "second" if plan.before is None else "first"
        console.print(f"{title} is in the {where} file alone.", highlight=False)
        return
    if plan.figures:
        console.print(_figures(title, plan.figures))
    if plan.changes:
        console.print(_changes(title, plan.changes))


def _figures(title: str, figures: Sequence[tuple[str, Any, Any]]) -> Table:
    table = Table("figure", "before", "after", title=title, title_justify="left")
    for name, one, other in figures:
        table.add_row(escape(name), *(escape(_figure(name, value)) for value in (one, other)))
    return table


def _figure(name: str, value: Any) -> str:
    """A value with the unit that its name implies."""
    if value is None or value == "":
        return NONE
    if name.endswith(("_seconds", ".seconds")):
        return format_seconds(value)
    if isinstance(value, int) and (name.endswith("_bytes") or name.startswith("budgets.")):
        return f"{format_bytes(value)} ({value} bytes)"
    return str(getattr(value, "value", value))


def _changes(title: str, changes: Sequence[Change]) -> Table:
    table = Table(
        Column("storage", overflow="fold"),
        Column("bytes", justify="right"),
        Column("differs"),
        Column("before"),
        Column("after"),
        Column("why, now", overflow="fold"),
        title=f"{title}: {len(changes)} moves differ",
        title_justify="left",
    )
    for change in changes:
        storage = change.storage
        what = escape("\n".join((storage_words(storage), made_words(storage))))
        why = "" if change.after is None else change.after.reason
        size, differs = format_bytes(storage.nbytes), ", ".join(change.how)
        actions = (_action(each, dead=storage.dead) for each in (change.before, change.after))
        table.add_row(what, size, differs, *actions, escape(why))
    return table


def _action(storage: Storage | None, *, dead: bool) -> str:
    if storage is None:
        return "drop" if dead else "keep"
    return action_words(storage)
