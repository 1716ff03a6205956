"""command: run benchmarks, print a table of each, and save all results in one file."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.kit import results, show
from benchmarks.kit.benchmark import Benchmark, Patience
from benchmarks.kit.earlier import Earlier, Resuming, earlier
from benchmarks.kit.rows import Row
from outcore.errors import OutcoreError, did_you_mean

S = TypeVar("S")
Arguments = argparse.Namespace


def _nothing(_: object) -> None:
    """Do nothing: the default for both callbacks of a Kit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit(Generic[S]):
    """A group of benchmarks with a common command line."""

    name: str
    description: str
    benchmarks: Mapping[str, Benchmark[S]]
    scale: Callable[[Arguments], S]
    """From the command line's arguments: how much is run."""
    machine: Callable[[S], dict[str, Any]]
    """A description of the machine on which the figures are taken."""
    add_arguments: Callable[[argparse.ArgumentParser], object] = _nothing
    finish: Callable[[Path], object] = _nothing
    """Called with the file of results, once everything is saved."""
    minutes: float | None = None
    """Default time limit; None means no limit."""
    grace_seconds: float = 0.0
    """How long what has begun may continue after the time limit."""
    resuming: Resuming | None = None
    """How to continue a run that was cut short; None if that is not supported."""


def run_kit(kit: Kit[S], arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names. Exits with 1 if one of them failed."""
    parser, resuming = _parser(kit), kit.resuming
    given = parser.parse_args(arguments)
    for name in given.only:
        if name not in kit.benchmarks:
            parser.error(f"unknown benchmark {name!r}: {did_you_mean(name, kit.benchmarks)}")
    try:
        scale = kit.scale(given)
    except OutcoreError as error:
        parser.error(str(error))
    file = given.out or results.default_file(kit.name, small=given.small)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    where = kit.machine(scale)
    print(*(f"{name}: {value}" for name, value in where.items()), sep="\n")
    fine = True
    names = list(dict.fromkeys(given.only)) or list(kit.benchmarks)
    known: dict[str, Earlier] = {}
    if resuming is not None and given.go_on:
        try:
            found = [(name, earlier(file, name, where, scale, resuming)) for name in names]
        except ValueError as error:
            parser.error(f"--go-on: {error}")
        known = {name: each for name, each in found if each is not None}
        for name in [name for name in known if known[name].done]:
            print(f"\n{name}: complete, of {known[name].part['date']}")
            names.remove(name)
    for number, name in enumerate(names):
        # Time that one benchmark leaves of its share goes to the benchmarks after it.
        weights = [kit.benchmarks[each].weight for each in names[number:]]
        left = None if end is None else end - time.monotonic()
        share = None if left is None else left * weights[0] / sum(weights)
        last = None if left is None else left + kit.grace_seconds
        running = _Running(kit.benchmarks[name], scale, where, known.get(name))
        rows = known[name].known if name in known else {}
        fine &= _run(running, Patience(share, last, rows), file)
    if file.exists():
        kit.finish(file)
    print(f"\nsaved in {file}")
    if not fine:
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class _Running(Generic[S]):
    """A running benchmark: its scale, the machine, and what an earlier run has of it."""

    benchmark: Benchmark[S]
    scale: S
    where: dict[str, Any]
    earlier: Earlier | None

    def part(self, rows: Sequence[Row], *, complete: bool) -> dict[str, Any]:
        found = [*map(results.saved, rows)]
        if self.earlier is not None:
            found = self.earlier.with_later(found)
        return results.part(self.benchmark, self.scale, self.where, found, complete=complete)


def _run(running: _Running[Any], patience: Patience, file: Path) -> bool:
    """Run one benchmark, save after each row, and print the table. Returns whether it succeeded."""
    benchmark = running.benchmark
    print(f"\n{benchmark.name}: {benchmark.summary}", flush=True)
    start = time.monotonic()
    rows: list[Row] = []
    fine = True

    def save(*, complete: bool) -> None:
        results.save(file, benchmark.name, running.part(rows, complete=complete))

    try:
        for row in benchmark.run(running.scale, patience):
            rows.append(row)
            print(".", end="", file=sys.stderr, flush=True)
            save(complete=False)
        if rows or running.earlier is not None:  # keep what an earlier run left
            save(complete=not patience.cut)
    except Exception:  # noqa: BLE001 - the other benchmarks should still run
        print(f"\n{traceback.format_exc()}", file=sys.stderr)
        fine = False
    print(file=sys.stderr, flush=True)
    print(show.table(rows) if rows else "there are no rows")
    print(f"{show.verdict(rows)}, in {time.monotonic() - start:.0f} s")
    if patience.cut or not fine:
        print(f"some rows are missing: {'no time was left' if fine else 'it failed'}", flush=True)
    return fine


def _parser(kit: Kit[S]) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {b.name:<10}{b.summary}" for b in kit.benchmarks.values())
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{kit.name}",
        description=kit.description,
        epilog=f"benchmarks:\n{lines}\n\nHow to read the tables: docs/benchmarks.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="which; else all")
    parser.add_argument(
        "--small", action="store_true", help="tiny networks, few rounds: only to see that it works"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=kit.minutes,
        help="begin nothing more after this time, shared among benchmarks"
        + (f"; {kit.minutes:g} if not given" if kit.minutes else ""),
    )
    parser.add_argument(
        "--out", type=Path, help=f"the file; else benchmarks/results/{kit.name}-DATE.json"
    )
    if kit.resuming is not None:
        parser.add_argument(
            "--go-on",
            action="store_true",
            help="keep what the file has of such a machine, and measure the rows that it lacks",
        )
    kit.add_arguments(parser)
    return parser
