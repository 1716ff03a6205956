"""outcore policies: list the policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from outcore.cli.predicted import tell_broken
from outcore.cli.screen import screen
from outcore.errors import PolicyError

if TYPE_CHECKING:
    from outcore.policies import Policy


def policies() -> None:
    """List the policies, including those of other packages, with options and summaries."""
    # This loads numpy, which `outcore --help` does not need.
    from outcore.policies import POLICIES, plugins  # noqa: PLC0415 - see above

    found = plugins()
    table = Table("policy", "options and defaults", "what it does")
    for name, kind in POLICIES.items():
        table.add_row(name, *_cells(kind))
    for plugin in found:
        if not isinstance(plugin.kind, PolicyError):
            table.add_row(escape(f"{plugin.name}\n({plugin.distribution})"), *_cells(plugin.kind))
    screen().print(table)
    tell_broken(str(plugin.kind) for plugin in found if isinstance(plugin.kind, PolicyError))


def _cells(kind: type[Policy]) -> tuple[str, str]:
    from outcore.spec import options, value_text  # noqa: PLC0415 - with the policies

    given = (f"{each.name}={value_text(each.name, each.default)}" for each in options(kind))
    return "\n".join(given), escape(kind.summary)
