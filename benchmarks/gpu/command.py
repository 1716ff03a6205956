"""command: the command line of the GPU benchmarks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.kept import keep_in
from benchmarks.gpu.machine import machine
from benchmarks.gpu.plots import plot
from benchmarks.gpu.processes import close_spares
from benchmarks.gpu.scale import FULL, SMALL, SMALL_ON_GPU, Scale
from benchmarks.gpu.table import BENCHMARKS
from benchmarks.gpu.training import failed, key
from benchmarks.kit.command import Kit, run_kit
from benchmarks.kit.earlier import Resuming, Saved
from outcore.errors import OptionValueError
from outcore.execute.segments import asked, expanding, expands
from outcore.runtime.limits.host import memory_limit_bytes
from outcore.units import parse_size


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: with --small, only to see that it works",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep problems, plans and timelines of outcore's rows there, to analyze them later",
    )
    parser.add_argument(
        "--host-budget",
        metavar="SIZE",
        help="host memory for outcore (88GiB); else most of what the system says is free",
    )


def _scale(given: argparse.Namespace) -> Scale:
    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionValueError(
            option="--device",
            value="cuda",
            reason="torch sees no GPU here; `--device cpu --small` runs all of this without one",
        )
    if given.keep is not None:
        keep_in(given.keep)
    host = None if given.host_budget is None else _host_bytes(given.host_budget)
    small = SMALL if given.device == "cpu" else SMALL_ON_GPU
    return replace(small if given.small else FULL, device=given.device, host_bytes=host)


def _host_bytes(given: str) -> int:
    try:
        return parse_size(given, memory_limit_bytes())
    except ValueError as error:
        raise OptionValueError(option="--host-budget", value=given, reason=str(error)) from error


def _machine(machine: Saved) -> tuple[str, ...]:
    """Figures are comparable if GPU, driver and libraries are the same: their names."""
    names = ("device", "driver", "cuda", "cudnn")
    return str(machine["versions"]["torch"]), *(str(machine.get(name)) for name in names)


KIT = Kit(
    name="gpu",
    description="Measure outcore on one GPU; it should have nothing else to do.",
    benchmarks=BENCHMARKS,
    scale=_scale,
    machine=machine,
    add_arguments=_add_arguments,
    finish=plot,
    minutes=7.0,
    grace_seconds=45.0,
    resuming=Resuming(key=key, failed=failed, machine=_machine),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names."""
    # Set this for all processes to come: outcore would set it only for its own.
    name, text = asked(os.environ)
    if expands(text) is None:
        os.environ[name] = expanding(text)
    try:
        run_kit(KIT, arguments)
    finally:
        close_spares()
