"""outcore plan: make, show, diff, check and explain plans as files."""

from __future__ import annotations

import typer

from outcore.cli.commands.plan.check import check
from outcore.cli.commands.plan.diff import diff
from outcore.cli.commands.plan.explain import explain
from outcore.cli.commands.plan.make import make
from outcore.cli.commands.plan.schema import schema
from outcore.cli.commands.plan.show import show

plan_app = typer.Typer(
    no_args_is_help=True,
    help="Plans as files: make, show, diff, check and explain them.",
    epilog="Exit codes: 0 same or valid, 1 different or not valid, 2 a mistake in the call.",
)
for command in (make, show, diff, check, explain, schema):
    plan_app.command()(command)
