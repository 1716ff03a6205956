"""The command line: run benchmarks, print a table of each, and save all in one file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import results, show
from benchmarks.cpu.benchmark import FULL, SMALL, Benchmark, Patience, Scale
from benchmarks.cpu.machine import machine
from benchmarks.cpu.rows import Row
from benchmarks.cpu.table import BENCHMARKS
from benchmarks.cpu.worker import WorkerError
from outcore.errors import OutcoreError, did_you_mean


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line names."""
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}: {did_you_mean(name, BENCHMARKS)}")
    scale = SMALL if given.small else FULL
    file = given.out or results.default_file(small=given.small)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    where = machine()
    print(*(f"{name}: {value}" for name, value in where.items()), sep="\n")
    fine = True
    names = list(dict.fromkeys(given.names)) or list(BENCHMARKS)
    for number, name in enumerate(names):
        # What one benchmark leaves of its part goes to those after it.
        share = None if end is None else (end - time.monotonic()) / (len(names) - number)
        fine &= run(BENCHMARKS[name], scale, Patience(share), file, where)
    print(f"\nsaved in {file}")
    if not fine:
        raise SystemExit(1)


def run(
    benchmark: Benchmark, scale: Scale, patience: Patience, file: Path, where: dict[str, Any]
) -> bool:
    """Run one benchmark, save after each row, print the table; whether it went through."""
    print(f"\n{benchmark.name}: {benchmark.summary}", flush=True)
    start = time.monotonic()
    rows: list[Row] = []
    fine = True

    def save(*, complete: bool) -> None:
        part = results.part(benchmark, scale, where, rows, complete=complete)
        results.save(file, benchmark.name, part)

    try:
        for row in benchmark.run(scale, patience):
            rows.append(row)
            print(".", end="", file=sys.stderr, flush=True)
            save(complete=False)
        if rows:  # what an earlier run left is better than nothing
            save(complete=not patience.cut)
    except (OutcoreError, WorkerError) as error:
        print(f"\n{error}", file=sys.stderr)
        fine = False
    print(file=sys.stderr, flush=True)
    print(show.table(rows) if rows else "there are no rows")
    print(f"{show.verdict(rows)}, in {time.monotonic() - start:.0f} s")
    if patience.cut or not fine:
        print(f"some rows are missing: {'no time was left' if fine else 'it failed'}", flush=True)
    return fine


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {b.name:<10}{b.summary}" for b in BENCHMARKS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description="Measure outcore on this machine's CPU; it should have nothing else to do.",
        epilog=f"benchmarks:\n{lines}\n\nHow to read the tables: docs/benchmarks.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; else all")
    parser.add_argument(
        "--small", action="store_true", help="tiny networks, few rounds: only to see that it works"
    )
    parser.add_argument(
        "--minutes", type=float, help="begin nothing more after this time, shared among benchmarks"
    )
    parser.add_argument("--out", type=Path, help="the file; else benchmarks/results/cpu-DATE.json")
    return parser
