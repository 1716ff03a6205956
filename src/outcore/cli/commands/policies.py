"""outcore policies: the ways to plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outcore.cli.screen import screen

if TYPE_CHECKING:
    from outcore.errors import PolicyError
    from outcore.policies import Policy

EXIT_BROKEN = 2


def policies() -> None:
    """List the policies, also those of other packages, with their options and what they do."""
    # Policies load numpy, which `outcore --help` does not need.
    from outcore.errors import PolicyError  # noqa: PLC0415 - with them
    from outcore.policies import POLICIES, plugins  # noqa: PLC0415 - see above

    found = plugins()
    table = Table("policy", "options and defaults", "what it does")
    for name, kind in POLICIES.items():
        table.add_row(name, *_cells(kind))
    for plugin in found:
        if not isinstance(plugin.kind, PolicyError):
            table.add_row(escape(f"{plugin.name}\n({plugin.distribution})"), *_cells(plugin.kind))
    screen().print(table)
    _tell(plugin.kind for plugin in found if isinstance(plugin.kind, PolicyError))


def _tell(wrong: Iterable[PolicyError]) -> None:
    """Say which policies of other packages cannot be used, and end with an exit code for that."""
    errors = [Text(f"error: {error}", style="red") for error in wrong]
    for text in errors:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
    if errors:
        raise typer.Exit(EXIT_BROKEN)


def _cells(kind: type[Policy]) -> tuple[str, str]:
    from outcore.spec import options, value_text  # noqa: PLC0415 - with the policies

    given = (f"{each.name}={value_text(each.name, each.default)}" for each in options(kind))
    return "\n".join(given), escape(kind.summary)
