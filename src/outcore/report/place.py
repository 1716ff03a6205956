"""place: check that output files can be written, before the work that fills them starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outcore.errors import OptionValueError


def check_file(option: str, file: Path) -> None:
    """Raise OptionValueError if `file` is a folder, in no existing folder, or not writable."""
    reason = _reason(file)
    if reason:
        raise OptionValueError(option=option, value=str(file), reason=reason)


def check_apart(files: Iterable[tuple[str, Path]]) -> None:
    """Raise OptionValueError if two options name one file: the second would overwrite the first."""
    taken: dict[Path, str] = {}
    for option, file in files:
        other = taken.setdefault(file.resolve(), option)
        if other != option:
            reason = f"{other} writes to that file too: name another"
            raise OptionValueError(option=option, value=str(file), reason=reason)


@contextmanager
def writing(option: str, file: Path) -> Iterator[None]:
    """Raise OptionValueError if writing fails after all, for example because the disk is full."""
    try:
        yield
    except OSError as error:
        reason = f"it cannot be written: {error.strerror or error}"
        raise OptionValueError(option=option, value=str(file), reason=reason) from error


def _reason(file: Path) -> str:
    """Why `file` cannot be written; empty if it can."""
    if file.is_dir():
        return "that is a folder: name a file in it"
    if not file.parent.is_dir():
        return f"there is no folder {str(file.parent)!r}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return "it cannot be written: you have no permission"
    return ""
