"""outcore compare: policies on a network and a machine, predicted."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from outcore.errors import BudgetError, OptionValueError
from outcore.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:
    from outcore.compare import Compared
    from outcore.presets import Preset

ALL = "all"
NOTHING = "-"
THIS_MACHINE = "this-machine"


def compare(  # noqa: PLR0913 - a command has as many arguments as options
    *,
    network: Annotated[str, typer.Option(help="A network of `outcore networks`.")] = "resnet50",
    batch: Annotated[
        list[int], typer.Option(min=1, help="Samples; may be given several times.")
    ] = [128],  # noqa: B006 - typer copies it
    hardware: Annotated[str, typer.Option(help="A machine of `outcore hardware`.")] = "v100-pcie3",
    budget: Annotated[
        list[str],
        typer.Option(help="Device memory (16GiB, 80%); several times; else all of it."),
    ] = ["100%"],  # noqa: B006 - as above
    policies: Annotated[str, typer.Option(help="Specs separated by ;, or all.")] = ALL,
    allocator: Annotated[
        str | None,
        typer.Option(help="What serves the memory: best-fit, virtual-chunks, ...; else none."),
    ] = None,
    bound: Annotated[
        bool, typer.Option(help="The least time of any plan, beside the policies.")
    ] = True,
    variants: Annotated[
        bool, typer.Option("--variants", help="Policies may choose algorithms of convolutions.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Plan a training step on a machine that need not be here, and simulate it."""
    from outcore import allocators  # noqa: PLC0415 - with the others
    from outcore.capture import trace_network  # noqa: PLC0415 - loads torch
    from outcore.compare import Comparison  # noqa: PLC0415 - loads numpy
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the others
    from outcore.networks import network as named  # noqa: PLC0415 - loads torch
    from outcore.policies import POLICIES, resolve  # noqa: PLC0415 - loads numpy

    if as_json and as_csv:
        raise OptionValueError(option="--csv", value="with --json", reason="choose one of the two")
    machine = _machine(hardware)
    total = machine.hardware.capacity(Tier.DEVICE)
    budgets = [_size(text, total) for text in budget]
    wanted = list(POLICIES) if policies == ALL else policies.split(";")
    specs = [resolve(spec) for spec in wanted]  # before anything is traced
    step = named(network)
    serving = None if allocator is None else allocators.resolve(allocator)
    found: list[dict[str, Any]] = []
    progress = Console(stderr=True)
    bound = bound and _has_solver(progress)
    for samples in batch:
        with progress.status(f"{network}, batch {samples}: tracing"):
            trace = trace_network(step, samples)
            comparison = Comparison(trace, machine, samples, allocator=serving, variants=variants)
        rows = []
        with progress.status(f"{network}, batch {samples}: planning") as status:
            for row in comparison.rows(budgets, specs, bound=bound):
                rows.append(row)
                status.update(f"{network}, batch {samples}: {row.policy} done")
        found += [{"batch": samples, **row.to_dict()} for row in rows]
        if not (as_json or as_csv):
            seconds = comparison.in_core.seconds
            peak = format_bytes(comparison.in_core.peak(Tier.DEVICE))
            served = "" if allocator is None else f", memory by {allocator}"
            title = (
                f"{network}, batch {samples}, on {hardware}: in-core {samples / seconds:.4g} "
                f"items/s in {peak}{served} (all predicted)"
            )
            Console().print(_table(title, rows, allocator))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    if as_csv:
        _write_csv(found)


def _machine(name: str) -> Preset:
    """A preset, or this machine as it is measured now."""
    from outcore.presets import preset  # noqa: PLC0415 - reads files

    if name != THIS_MACHINE:
        return preset(name)
    from outcore.runtime.this_machine import this_machine  # noqa: PLC0415 - loads torch

    with Console(stderr=True).status("measuring this machine"):
        return this_machine()


def _size(text: str, total: int) -> int:
    """Raises BudgetError for what cannot be read, and for more than the machine has."""
    try:
        found = parse_size(text, total)
    except ValueError as error:
        raise BudgetError(option="--budget", value=text, reason=str(error)) from error
    if found > total:
        reason = f"the machine has {format_bytes(total)}"
        raise BudgetError(option="--budget", value=text, reason=reason)
    return found


def _has_solver(progress: Console) -> bool:
    """Whether lower bounds can be had; says how to get them where not."""
    found = find_spec("scipy") is not None
    if not found:
        progress.print('No lower bounds without scipy: pip install "outcore[plan]"', markup=False)
    return found


def _table(title: str, rows: Sequence[Compared], allocator: str | None) -> Table:
    policy = Column("policy", overflow="fold")
    table = Table(policy, title=title, title_justify="left", caption_justify="left")
    table.caption = _bounds(rows)
    reserved = () if allocator is None else ("reserved",)
    for name in (
        "budget",
        "step",
        "items/s",
        "of in-core",
        "peak",
        *reserved,
        "keep / offload / recompute",
        "planned in",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        held = [row.peak_bytes] if allocator is None else [row.peak_bytes, row.reserved_bytes]
        cells = (*_speed(row), *map(_bytes, held), *_planning(row))
        table.add_row(row.policy, format_bytes(row.budget_bytes), *cells)
    return table


def _bounds(rows: Sequence[Compared]) -> str | None:
    """What no plan can beat, for each budget that has such a bound."""
    bounds = {row.budget_bytes: row.lower_bound_seconds for row in rows}
    texts = [f"{format_seconds(s)} in {format_bytes(b)}" for b, s in bounds.items() if s]
    return f"any plan takes at least {', '.join(texts)}" if texts else None


def _speed(row: Compared) -> tuple[str, str, str]:
    """The step, or what it would take to have one."""
    if row.seconds is None or row.items_per_second is None:
        return (f"needs {_bytes(row.needed_bytes)} of {row.needed_tier}", NOTHING, NOTHING)
    relative = f"{row.relative_to_in_core or 0:.1%}"
    return (format_seconds(row.seconds), f"{row.items_per_second:.4g}", relative)


def _planning(row: Compared) -> tuple[str, str]:
    """The choices, and how long it took to make them."""
    counts, seconds = row.counts, row.planning_seconds
    return (
        NOTHING if counts is None else f"{counts.keep} / {counts.offload} / {counts.recompute}",
        NOTHING if seconds is None else format_seconds(seconds),
    )


def _bytes(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else format_bytes(nbytes)


def _write_csv(found: list[dict[str, Any]]) -> None:
    flat = []
    for row in found:
        counts = row.pop("counts") or dict.fromkeys(("keep", "offload", "recompute"))
        flat.append(row | counts)
    writer = csv.DictWriter(sys.stdout, list(flat[0]))
    writer.writeheader()
    writer.writerows(flat)
