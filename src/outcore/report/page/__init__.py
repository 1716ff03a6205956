"""page: render a Report as one self-contained HTML file that loads nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from outcore.report.figures import Report
from outcore.report.page.view import view_of

if TYPE_CHECKING:
    from jinja2 import Template


def page(report: Report) -> str:
    """The HTML text. It stays under 1 MB for thousands of ops: short spans are drawn together."""
    return _template().render(view=view_of(report), style=_text("page.css"), code=_text("page.js"))


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - only pages need it

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html"))


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
