"""app: put all commands together, and handle what they share: `--version`, and one-line errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from outcore import __version__
from outcore.cli.commands.compare import compare
from outcore.cli.commands.demo import demo
from outcore.cli.commands.doctor import doctor
from outcore.cli.commands.estimate import estimate
from outcore.cli.commands.explain import explain
from outcore.cli.commands.floor import floor
from outcore.cli.commands.hardware import hardware
from outcore.cli.commands.networks import networks
from outcore.cli.commands.plan import plan_app
from outcore.cli.commands.policies import policies
from outcore.cli.commands.report import report
from outcore.cli.commands.run import AS_GIVEN, HandedOver, run
from outcore.cli.commands.sweep import sweep
from outcore.errors import OutcoreError

EXIT_ERROR = 2
EXIT_UNFORESEEN = 70
"""Exit code for a bug in outcore; no command uses it for a result."""
QUIET = {
    "KINETO_LOG_LEVEL": "6",  # the meter uses torch's profiler, which announces itself
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it also warns of memory that was allocated before it started
}
"""Set before torch is loaded, unless the user did: torch would write into the progress bars."""


class Commands(TyperGroup):
    """Command group that prints errors as one line on stderr.

    Errors of outcore and of the operating system (such as a full disk) end with exit code 2,
    unexpected ones with EXIT_UNFORESEEN. With `--debug`, both end with a traceback instead.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the options before the command; `--help` and `--version` already print here."""
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:
            raise
        except OSError as error:
            _tell(f"error: {error}")
            raise typer.Exit(EXIT_ERROR) from error

    def invoke(self, ctx: Any) -> Any:
        """Run the command; `--debug` lets the traceback through."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader closed the pipe: not an error
            raise
        except (OutcoreError, OSError) as error:
            if ctx.params["debug"]:
                raise
            _tell(f"error: {error}")
            raise typer.Exit(EXIT_ERROR) from error
        except Exception as error:
            if ctx.params["debug"] or not _unforeseen(error):
                raise
            said = (str(error).splitlines() or [""])[0]
            _tell(f"error: {type(error).__name__}: {said}")
            _tell("a bug in outcore: please report it with the output of `outcore --debug ...`")
            raise typer.Exit(EXIT_UNFORESEEN) from error


def _unforeseen(error: Exception) -> bool:
    """Whether `error` is of a type that neither outcore nor its command-line libraries raise."""
    return type(error).__module__.split(".")[0] not in {"click", "typer", "outcore"}


def _tell(text: str) -> None:
    with suppress(OSError):  # the exit code still tells
        Console(stderr=True).print(Text(text, style="red"), soft_wrap=True, highlight=False)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Train PyTorch networks that do not fit in device memory.",
)


def _show_version(wanted: bool | None) -> None:  # noqa: FBT001 - typer calls it with the value
    if wanted:
        typer.echo(f"outcore {__version__}")
        raise typer.Exit


@app.callback()
def common(
    ctx: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - read by its callback
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
    debug: Annotated[  # noqa: ARG001 - read by Commands
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Handle the options that come before a command."""
    if ctx.invoked_subcommand == run.__name__:
        return  # the script's environment stays as the user set it
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)


for command in (
    demo,
    doctor,
    estimate,
    compare,
    sweep,
    floor,
    explain,
    report,
    policies,
    networks,
    hardware,
):
    app.command()(command)
app.command(context_settings=AS_GIVEN)(run)
app.add_typer(plan_app, name="plan")


@contextmanager
def _printing_anything() -> Iterator[None]:
    """Print characters that standard output cannot encode as escapes, as standard error does."""
    stream = sys.stdout
    if not isinstance(stream, TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)  # a script's output stays as it was set up


def main() -> None:
    """Run the command line."""
    excepthook, script = sys.excepthook, None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - open until the process ends
    try:
        with _printing_anything():
            app()
    except HandedOver as handed_over:
        script = handed_over.script
    if script is not None:  # outside `except`: the script's errors get no context from us
        sys.excepthook = excepthook  # typer replaced it
        script.run()
