"""outcore plan show: show the contents of a plan file."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.saved import File
from outcore.cli.screen import screen
from outcore.cli.words import FOR_RERUNS, action_words, headline, made_words, storage_words
from outcore.units import format_bytes

WIDTH = 14


def show(
    file: File,
    *,
    top: Annotated[
        int | None, typer.Option(min=1, help="Show only the N largest tensors (default: all).")
    ] = None,
) -> None:
    """Show a plan's figures, and which storages it moves."""
    from outcore.planfile import load_plans  # noqa: PLC0415 - loads numpy

    found, console = load_plans(file), screen()
    for number, saved in enumerate(found.plans, 1):
        if len(found.plans) > 1:
            console.print(f"graph {number} of {len(found.plans)}", highlight=False)
        for name, text in headline(found, saved):
            console.print(f"{name:<{WIDTH}}{text}", highlight=False, markup=False, soft_wrap=True)
        if not saved.storages:
            console.print("Everything is kept.")
            continue
        largest = sorted(saved.storages, key=lambda storage: -storage.nbytes)[:top]
        of = f"{len(saved.storages)} that are moved"
        if any(storage.dead for storage in saved.storages):
            of += f" or held {FOR_RERUNS}"
        table = Table(
            Column("storage", overflow="fold"),
            Column("bytes", justify="right"),
            Column("action"),
            Column("made by", overflow="fold"),
            Column("idle", overflow="fold"),
            title=f"{len(largest)} of {of}, the largest first",
            title_justify="left",
        )
        for storage in largest:
            idle = f"after op {storage.after.op} until op {storage.before.op}"
            cells = (storage_words(storage), made_words(storage), idle)
            name, made, when = map(escape, cells)
            table.add_row(name, format_bytes(storage.nbytes), action_words(storage), made, when)
        console.print(table)
