"""The command line, and the page that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.kit.command import Kit, run_kit
from benchmarks.reproduction.page import write_page
from benchmarks.reproduction.steps import Scale
from benchmarks.reproduction.table import BENCHMARKS


def main(arguments: Sequence[str] | None = None) -> None:
    """Model what is named, else all, and write the page anew."""
    run_kit(
        Kit(
            name="reproduction",
            description="The papers' own figures beside ours, on modelled hardware.",
            benchmarks=BENCHMARKS,
            scale=lambda given: Scale(small=given.small),
            machine=_machine,
            finish=write_page,
        ),
        arguments,
    )


def _machine(_scale: Scale) -> dict[str, Any]:
    """Nothing is measured: the figures depend on versions alone."""
    return {"versions": {name: version(name) for name in ("outcore", "torch")}}
