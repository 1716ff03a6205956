"""outcore run: run a training script, and show what would fit if it runs out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outcore.errors import OptionValueError

if TYPE_CHECKING:
    from outcore.preflight.script import Script

AS_GIVEN = {"allow_interspersed_args": False}
"""All arguments after the script's name belong to the script."""


class HandedOver(BaseException):
    """Carries a script out of the command line, which would change how it ends."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.name)
        self.script = script


def run(
    *,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [--] [ARGUMENTS]...")
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", help="Run a module by name, as `python -m` does.")
    ] = None,
) -> None:
    """Run a training script unchanged; if it runs out of memory, show what would fit."""
    from outcore.preflight.script import Script  # noqa: PLC0415 - only this command needs it

    given = list(arguments or ())
    if module is not None:
        raise HandedOver(Script(module, _rest(given), is_module=True))
    if not given or not given[0]:  # Path("") is the current folder
        raise OptionValueError(option="SCRIPT", value="", reason="name a script, or a module by -m")
    if not Path(given[0]).exists():
        raise OptionValueError(option="SCRIPT", value=given[0], reason="there is no such file")
    raise HandedOver(Script(given[0], _rest(given[1:])))


def _rest(given: list[str]) -> tuple[str, ...]:
    """The script's arguments, without a leading `--`."""
    return tuple(given[1:] if given[:1] == ["--"] else given)
