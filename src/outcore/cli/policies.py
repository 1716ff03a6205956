"""outcore policies: the ways to plan."""

from __future__ import annotations

from dataclasses import Field

from rich.console import Console
from rich.table import Table

from outcore.units import spell_size


def policies() -> None:
    """List the policies with their options and what they do."""
    # Policies load numpy, which `outcore --help` does not need.
    from outcore.policies import POLICIES  # noqa: PLC0415 - see above
    from outcore.spec import options  # noqa: PLC0415 - with it

    table = Table("policy", "options and defaults", "what it does")
    for name, kind in POLICIES.items():
        table.add_row(name, "\n".join(map(_option_text, options(kind))), kind.summary)
    Console().print(table)


def _option_text(option: Field[object]) -> str:
    """An option as a policy spec would write its default."""
    value = option.default
    if isinstance(value, bool):
        return f"{option.name}={str(value).lower()}"
    if isinstance(value, int) and option.name.endswith("_bytes"):
        return f"{option.name}={spell_size(value)}"
    return f"{option.name}={value}"
