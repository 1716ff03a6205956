"""lines: find the line of the user's own code that an error comes from."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_FILE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_THEIRS = ("torch", "outcore")


def line_of(error: BaseException) -> str:
    """The innermost line that is not torch's, Python's or outcore's, as `train.py:41: x.numpy()`.

    Empty if there is none.
    """
    hidden = _hidden()
    for file, line in _frames(error):
        path = Path(file)
        if not file.startswith("<") and not any(path.is_relative_to(each) for each in hidden):
            text = linecache.getline(file, line).strip()
            return f"{path.name}:{line}" + (f": {text}" if text else "")
    return ""


def _frames(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """File and line of each frame, the innermost first.

    Torch's compiler runs no line of the user's code, but its messages name them.
    """
    while error is not None:
        for each in reversed(list(_FILE.finditer(str(error)))):
            yield each["file"], int(each["line"])
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            yield frame.filename, frame.lineno or 0
        error = error.__cause__


def _hidden() -> list[Path]:
    """Folders whose code is not the user's."""
    specs = (find_spec(name) for name in _NOT_THEIRS)
    packages = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    library = Path(sysconfig.get_path("stdlib"))
    inside = [p for p in library.iterdir() if p.name != "site-packages"] if library.exists() else []
    return [*packages, *inside]
