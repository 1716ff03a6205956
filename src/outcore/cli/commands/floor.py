"""outcore floor: predict the smallest feasible budget, and show the op that sets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.screen import screen
from outcore.cli.subject import (
    Batches,
    Machine,
    Network,
    Real,
    States,
    Target,
    subjects,
)
from outcore.ir.margin import budget_for
from outcore.units import format_bytes, format_count, spell_size

if TYPE_CHECKING:
    from outcore.compare import Comparison
    from outcore.policies.holdings import Holdings

WIDTH = 16


def floor(
    target: Target = None,
    *,
    network: Network = None,
    batch: Batches = None,
    hardware: Machine = None,
    states: States = None,
    real: Real = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False,
) -> None:
    """Show the smallest budget of a training step, the op that sets it, and what it holds."""
    progress, console = Console(stderr=True), screen()
    found = []
    for step in subjects(target, network, batch, hardware, states, real=real):
        with progress.status(escape(step.title)) as status:
            comparison = step.traced_comparison(status)
            holdings = comparison.floor()
        found.append({**step.key, **_figures(comparison, holdings)})
        if not as_json:
            title = f"{step.on_machine} (all predicted)"
            console.print(title, highlight=False, markup=False, soft_wrap=True)
            for name, text in _lines(found[-1]):
                console.print(f"{name:<{WIDTH}}{text}", highlight=False, soft_wrap=True)
            console.print(_table(holdings))
    if as_json:
        typer.echo(json.dumps(found, indent=1))


def _figures(comparison: Comparison, holdings: Holdings) -> dict[str, Any]:
    """All figures by name, as `--json` prints them."""
    in_core, floor_bytes = comparison.in_core_peak_bytes, holdings.floor.nbytes
    return {
        "floor_bytes": floor_bytes,
        "training_budget_bytes": budget_for(floor_bytes),
        "proved_floor_bytes": comparison.proved_floor_bytes(),
        "in_core_peak_bytes": in_core,
        "of_in_core_peak": floor_bytes / in_core if in_core else 1.0,
        "machine_bytes": comparison.machine_bytes,
        "set_by": holdings.floor.op,
        "op": holdings.op,
        "outside_bytes": holdings.outside_bytes,
        "between_bytes": holdings.between_bytes,
        "workspace_bytes": holdings.workspace_bytes,
        "held": [
            {
                "why": each.why,
                "role": each.role.value,
                "buffers": each.buffers,
                "bytes": each.nbytes,
            }
            for each in holdings.holdings
        ],
    }


def _lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The figures that are not in the table, as text."""
    peak, lowest, machine = (
        figures[name] for name in ("in_core_peak_bytes", "floor_bytes", "machine_bytes")
    )
    yield "in-core peak", _exact(peak)
    missing = "" if lowest <= machine else f"; the machine has {format_bytes(machine)}"
    share = f"{figures['of_in_core_peak']:.1%} of the in-core peak"
    yield "floor", f"{_exact(lowest)}: {share}{missing}"
    training = spell_size(figures["training_budget_bytes"])
    yield "in training", f"{training}, with the margin that plans leave free"
    yield "proved", f"no plan fits less than {_exact(figures['proved_floor_bytes'])}"
    yield "set by", figures["set_by"]


def _table(holdings: Holdings) -> Table:
    """The parts of the floor; its column of bytes adds up to the floor."""
    numbers = (Column(name, justify="right") for name in ("buffers", "bytes"))
    table = Table("held there", "role", *numbers)
    for each in holdings.holdings:
        size = format_bytes(each.nbytes)
        table.add_row(each.why, each.role.value, format_count(each.buffers), size)
    for what, nbytes in (
        ("workspace of the op", holdings.workspace_bytes),
        ("needed between the calls", holdings.between_bytes),
        ("outside: optimizer, unused weights", holdings.outside_bytes),
    ):
        if nbytes:
            table.add_row(what, "", "", format_bytes(nbytes))
    return table


def _exact(nbytes: int) -> str:
    """A size in a readable unit and in bytes."""
    return f"{format_bytes(nbytes)} ({format_count(nbytes)} bytes)"
