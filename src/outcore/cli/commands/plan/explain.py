"""outcore plan explain: show why a saved plan moves each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.saved import File
from outcore.cli.screen import screen
from outcore.cli.words import action_words, made_words, storage_words
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outcore.planfile import SavedPlan

SHOWN = 20


def explain(
    file: File,
    *,
    top: Annotated[
        int, typer.Option(min=1, help="Show only the N largest tensors of each graph.")
    ] = SHOWN,
) -> None:
    """Show the alternatives for each storage that a saved plan moves.

    All figures are from the file: they were simulated when it was made.
    """
    from outcore.planfile import load_plans  # noqa: PLC0415 - loads numpy

    found, console = load_plans(file), screen()
    for number, saved in enumerate(found.plans, 1):
        seconds = format_seconds(saved.predicted.seconds)
        graph = f"graph {number}, " if len(found.plans) > 1 else ""
        console.print(
            f"{graph}{saved.policy or 'a plan'}: {seconds} a step (simulated)", highlight=False
        )
        console.print(_table(saved, top) if saved.storages else "Everything is kept.")


def _table(saved: SavedPlan, top: int) -> Table:
    largest = sorted(saved.storages, key=lambda storage: -storage.nbytes)[:top]
    table = Table(
        Column("storage", overflow="fold"),
        Column("bytes", justify="right"),
        Column("action"),
        Column("otherwise", overflow="fold"),
        title=f"{len(largest)} of {len(saved.storages)} moves, the largest first",
        title_justify="left",
        show_lines=True,
    )
    for storage in largest:
        what = escape("\n".join((storage_words(storage), made_words(storage))))
        why = escape(storage.reason.replace("; ", "\n") or "not analyzed")
        table.add_row(what, format_bytes(storage.nbytes), action_words(storage), why)
    return table
