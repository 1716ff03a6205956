"""style: colors and sizes that drawings share, and checks for those by matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from outcore.errors import MissingPackageError, OptionValueError
from outcore.report.place import check_file

SUFFIXES = (".png", ".pdf", ".svg")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b4a9c", "#222222")
"""The palette of Okabe and Ito, safe for color-blind readers, with violet in place of yellow."""
GRAY, PALE = "#666666", "#e4e4e4"
GIB = 1 << 30
NEAR = 3.0
"""A limit of more than this many times the peak is stated in words, not drawn."""
DPI = 160


def check_plot(file: Path) -> None:
    """Refuse what cannot be drawn, before minutes of planning.

    Raises OptionValueError if the file is of another kind or cannot be written,
    MissingPackageError if matplotlib is not installed.
    """
    if file.suffix not in SUFFIXES:
        reason = f"a plot is written as {', '.join(SUFFIXES)}, by the end of the file's name"
        raise OptionValueError(option="plot", value=str(file), reason=reason)
    check_file("plot", file)
    if find_spec("matplotlib") is None:
        purpose = "a plot is drawn by matplotlib"
        raise MissingPackageError(package="matplotlib", extra="plot", purpose=purpose)
