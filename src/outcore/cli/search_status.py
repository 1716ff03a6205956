"""search_status: show the progress of a long search on a status line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from rich.markup import escape
from rich.status import Status


@contextmanager
def reporting_search(status: Status, title: str) -> Iterator[None]:
    """Show a search's progress on `status` after `title`; send what policies print to stderr."""
    log = logging.getLogger("outcore.search")
    handler, before = _Shower(status, title), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


class _Shower(logging.Handler):
    """Shows log messages on a status line."""

    def __init__(self, status: Status, title: str) -> None:
        super().__init__()
        self.status, self.title = status, title

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self.status.update(escape(f"{self.title}: {record.getMessage()}"))
