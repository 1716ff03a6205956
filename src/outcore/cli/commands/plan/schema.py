"""outcore plan schema: print the JSON Schema of plan files."""

from __future__ import annotations

import typer


def schema() -> None:
    """Print the JSON Schema of plan files; `$defs/overrides` is the schema of overrides."""
    from outcore.planfile import schema_text  # noqa: PLC0415 - loads numpy

    typer.echo(schema_text(), nl=False)
