"""predicted: read and print what all predicting commands share, such as machines and policies."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from outcore.errors import OptionValueError, PolicyError
from outcore.units import format_bytes

if TYPE_CHECKING:
    from outcore.policies import Policy
    from outcore.presets import Preset

ALL = "all"
NOTHING = "-"
THIS_MACHINE = "this-machine"
EXIT_BROKEN = 2

_BETWEEN = re.compile(r"\s*[;,]\s*(?![^{]*\})")
"""Separates specs; does not match the commas of their options."""


def machine_of(name: str) -> Preset:
    """The preset of that name; for `this-machine`, this machine, measured now."""
    from outcore.presets import preset  # noqa: PLC0415 - reads files

    if name != THIS_MACHINE:
        return preset(name)
    from outcore.runtime.this_machine import this_machine  # noqa: PLC0415 - loads torch

    with Console(stderr=True).status("measuring this machine"):
        return this_machine()


def policies_of(specs: str) -> tuple[list[Policy], list[str]]:
    """The policies of specs that commas or semicolons separate, or all known policies.

    For `all`, also returns the error messages of policies that are broken. For specs, raises
    PolicyError instead.
    """
    from outcore.policies import KnownPolicies, resolve  # noqa: PLC0415 - loads numpy

    if specs != ALL:
        return [resolve(spec) for spec in _BETWEEN.split(specs)], []
    found, wrong = [], []
    for name in KnownPolicies():
        try:
            found.append(resolve(name))
        except PolicyError as error:
            wrong.append(str(error))
    return found, wrong


def tell_broken(wrong: Iterable[str]) -> None:
    """Print the error messages of broken policies, if any, and end with EXIT_BROKEN."""
    told = [Text(f"error: {reason}", style="red") for reason in dict.fromkeys(wrong)]
    for text in told:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
    if told:
        raise typer.Exit(EXIT_BROKEN)


def has_solver(progress: Console) -> bool:
    """Whether scipy, which lower bounds need, is installed; if not, says how to install it."""
    found = find_spec("scipy") is not None
    if not found:
        progress.print("No lower bounds without scipy: pip install scipy", markup=False)
    return found


def check_one_form(*, as_json: bool, as_csv: bool) -> None:
    """Raise OptionValueError if both forms are requested."""
    if as_json and as_csv:
        raise OptionValueError(option="--csv", value="with --json", reason="choose one of the two")


def print_rows(found: Sequence[dict[str, Any]], *, as_json: bool, as_csv: bool) -> None:
    """Print rows of `Compared.to_dict` as JSON or CSV; nothing if neither is requested."""
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    if as_csv:
        _write_csv(found)


def bytes_text(nbytes: int | None) -> str:
    """A size as text; for None, NOTHING."""
    return NOTHING if nbytes is None else format_bytes(nbytes)


def _write_csv(found: Sequence[dict[str, Any]]) -> None:
    """Write one line per row, with a column for each count."""
    blank = dict.fromkeys(("keep", "offload", "recompute"))
    flat = [
        {name: value for name, value in row.items() if name != "counts"} | (row["counts"] or blank)
        for row in found
    ]
    writer = csv.DictWriter(sys.stdout, list(flat[0]))
    writer.writeheader()
    writer.writerows(flat)
