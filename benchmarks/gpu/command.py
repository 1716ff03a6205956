"""The kit of a GPU: its benchmarks, and on what device they are run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.machine import machine
from benchmarks.gpu.plots import plot
from benchmarks.gpu.scale import FULL, SMALL, Scale
from benchmarks.gpu.table import BENCHMARKS
from benchmarks.kit.command import Kit, run_kit
from outcore.errors import OptionValueError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: with --small, only to see that it works",
    )


def _scale(given: argparse.Namespace) -> Scale:
    if given.device == "cuda" and not torch.cuda.is_available():
        raise OptionValueError(
            option="--device",
            value="cuda",
            reason="torch sees no GPU here; `--device cpu --small` runs all of this without one",
        )
    return replace(SMALL if given.small else FULL, device=given.device)


KIT = Kit(
    name="gpu",
    description="Measure outcore on one GPU; it should have nothing else to do.",
    benchmarks=BENCHMARKS,
    scale=_scale,
    machine=machine,
    add_arguments=_add_arguments,
    finish=plot,
    minutes=8.5,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line names."""
    run_kit(KIT, arguments)
