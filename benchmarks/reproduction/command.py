"""command: the command line of the reproduction, which also writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.kit.command import Kit, run_kit
from benchmarks.reproduction.page import write_page
from benchmarks.reproduction.steps import Scale
from benchmarks.reproduction.table import BENCHMARKS


def main(arguments: Sequence[str] | None = None) -> None:
    """Model the parts that the command line names, or all, and rewrite the page."""
    run_kit(
        Kit(
            name="reproduction",
            description="The papers' own figures beside ours, on modeled hardware.",
            benchmarks=BENCHMARKS,
            scale=lambda given: Scale(small=given.small),
            machine=_machine,
            finish=write_page,
        ),
        arguments,
    )


def _machine(_scale: Scale) -> dict[str, Any]:
    """Only versions: nothing is measured, so figures do not depend on anything else."""
    return {"versions": {name: version(name) for name in ("outcore", "torch")}}
