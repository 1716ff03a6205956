"""outcore compare: simulate policies for a step and a machine that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outcore.cli.predicted import (
    ALL,
    NOTHING,
    bytes_text,
    check_one_form,
    has_solver,
    policies_of,
    print_rows,
    tell_broken,
)
from outcore.cli.screen import screen
from outcore.cli.search_status import reporting_search
from outcore.cli.subject import (
    Batches,
    Machine,
    Network,
    Real,
    States,
    Subject,
    Target,
    subjects,
)
from outcore.units import format_bytes, format_seconds

LEAST = len("swap-all")
"""Minimum width of the column of policies, in characters."""

if TYPE_CHECKING:
    from outcore.compare import Compared, Comparison


def compare(  # noqa: PLR0913 - a command has as many arguments as options
    target: Target = None,
    *,
    network: Network = None,
    batch: Batches = None,
    hardware: Machine = None,
    budget: Annotated[
        list[str],
        typer.Option(help="Device memory (16GiB, 80%); may be given several times."),
    ] = ["100%"],  # noqa: B006 - typer copies it
    policies: Annotated[
        str, typer.Option(help="Specs, separated by commas or semicolons, or all.")
    ] = ALL,
    allocator: Annotated[
        str | None,
        typer.Option(help="Also simulate this allocator and show reserved memory: best-fit, ..."),
    ] = None,
    bound: Annotated[
        bool, typer.Option(help="Also compute a lower bound on the time of any plan.")
    ] = True,
    variants: Annotated[
        bool, typer.Option("--variants", help="Let policies choose the algorithms of convolutions.")
    ] = False,
    states: States = None,
    real: Real = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Plan and simulate a training step for any known machine.

    Without samples, as for a script, items per second are steps per second.
    """
    from outcore import allocators  # noqa: PLC0415 - loads numpy

    check_one_form(as_json=as_json, as_csv=as_csv)
    steps = subjects(target, network, batch, hardware, states, real=real)
    budgets = [steps[0].budget_bytes(text) for text in budget]
    specs, broken = policies_of(policies)  # fail early, before tracing
    serving = None if allocator is None else allocators.resolve(allocator)
    found: list[dict[str, Any]] = []
    progress = Console(stderr=True)
    bound = bound and has_solver(progress)
    for step in steps:
        rows, shown = [], escape(step.title)
        with progress.status(shown) as status, reporting_search(status, step.title):
            comparison = step.traced_comparison(status, allocator=serving, variants=variants)
            status.update(f"{shown}: planning")
            for row in comparison.rows(budgets, specs, bound=bound):
                rows.append(row)
                status.update(f"{shown}: {row.policy} done")
        broken += [row.reason for row in rows if row.failed]
        found += [{**step.key, **row.to_dict()} for row in rows]
        if not (as_json or as_csv):
            screen().print(_table(step, comparison, rows, allocator))
    print_rows(found, as_json=as_json, as_csv=as_csv)
    tell_broken(broken)


def _table(
    step: Subject, comparison: Comparison, rows: Sequence[Compared], allocator: str | None
) -> Table:
    """One row for each policy and budget. A single budget is in the title, not in a column."""
    unit = "steps/s" if step.samples is None else "items/s"
    speed = f"{comparison.items / comparison.in_core.seconds:.4g} {unit}"
    peak = format_bytes(comparison.in_core_peak_bytes)
    served = "" if allocator is None else f", memory by {allocator}"
    title = f"{step.on_machine}: in-core {speed} in {peak}{served} (all predicted)"
    budgets = {row.budget_bytes for row in rows}
    one = f", budget {format_bytes(min(budgets))}" if len(budgets) == 1 else ""
    reserved = () if allocator is None else ("reserved",)
    columns = (
        Column("policy", min_width=LEAST, overflow="fold"),
        *(Column(name, justify="right") for name in (() if one else ("budget",))),
        *(Column(name, justify="right") for name in ("step", unit)),
        Column("of in-core", justify="right"),
        *(Column(name, justify="right", min_width=len("16.0 GiB")) for name in ("peak", *reserved)),
        Column("keep / offload / recompute", justify="right"),
        Column("planned in", justify="right"),
    )
    table = Table(*columns, title=escape(title + one), title_justify="left", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    table.caption, table.caption_justify = _bounds(rows), "left"
    for row in rows:
        held = [] if allocator is None else [bytes_text(row.reserved_bytes)]
        budget = () if one else (format_bytes(row.budget_bytes),)
        table.add_row(row.policy, *budget, *_speed(row), _peak(row), *held, *_planning(row))
    return table


def _bounds(rows: Sequence[Compared]) -> str | None:
    """The lower bound on the time for each budget that has one; None if none has."""
    bounds = {row.budget_bytes: row.lower_bound_seconds for row in rows}
    texts = [f"{format_seconds(s)} in {format_bytes(b)}" for b, s in bounds.items() if s]
    return f"any plan takes at least {', '.join(texts)}" if texts else None


def _speed(row: Compared) -> tuple[str, str, str]:
    if row.seconds is None or row.items_per_second is None:
        return NOTHING, NOTHING, NOTHING
    relative = f"{row.relative_to_in_core or 0:.1%}"
    return format_seconds(row.seconds), f"{row.items_per_second:.4g}", relative


def _peak(row: Compared) -> str:
    """The peak device memory; without a plan, the bytes that one would need."""
    if row.seconds is not None:
        return bytes_text(row.peak_bytes)
    if row.failed:
        return "failed"
    place = "" if row.needed_tier == "device" else f" of {row.needed_tier}"
    return f"needs {bytes_text(row.needed_bytes)}{place}"


def _planning(row: Compared) -> tuple[str, str]:
    """The numbers of kept, offloaded and recomputed tensors, and the planning time."""
    counts, seconds = row.counts, row.planning_seconds
    return (
        NOTHING if counts is None else f"{counts.keep}/{counts.offload}/{counts.recompute}",
        NOTHING if seconds is None else format_seconds(seconds),
    )
