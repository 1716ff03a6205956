"""Settings of Sphinx: `make docs` builds these pages into build/docs, and warnings are errors.

Nothing is fetched. Pages are plain Markdown that GitHub shows as well, so links between files of
the repository are written as such; here they are turned into links between pages.
"""
# ruff: noqa: INP001 - Sphinx reads this file by itself

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import outcore  # noqa: E402 - this checkout, and not what may be installed

project = "outcore"
author = "the outcore authors"
version = release = outcore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
highlight_language = "none"
html_theme = "furo"
html_title = f"outcore {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = False
nitpicky = True

myst_heading_anchors = 3

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autoclass_content = "class"
default_role = "code"
"""In docstrings, one backtick marks code, as it does on the pages."""

ELSEWHERE = {
    "readme": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "journeys": "examples/journeys/README.md",
}
"""Pages whose text stands elsewhere in the repository. Their files in docs/ hold their place."""

ALIASES = ("M", "Arg", "Ref", "Symbol")
"""Names in signatures that stand for types."""

LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=\))")


def read_page(_app: Any, name: str, source: list[str]) -> None:
    """Fill pages from elsewhere, and turn links to files into links to pages."""
    if name in ELSEWHERE:
        file = PurePosixPath(ELSEWHERE[name])
        text, folder = (ROOT / file).read_text(encoding="utf-8"), file.parent
    else:
        text, folder = source[0], PurePosixPath("docs", name).parent
    page_folder = PurePosixPath("docs", name).parent

    def target(link: re.Match[str]) -> str:
        path = PurePosixPath(normpath(str(folder / link["path"])))
        if (ROOT / path).is_dir():
            path /= "README.md" if (ROOT / path / "README.md").exists() else "index.md"
        for page, text_of in ELSEWHERE.items():
            if str(path) == text_of:
                path = PurePosixPath("docs", f"{page}.md")
        return relpath(str(path), str(page_folder)) + (link["anchor"] or "")

    source[0] = LINK.sub(target, text)


def find_name(_app: Any, environment: Any, node: Any, content: Any) -> Any:
    """Link a type in a signature to its public name; leave what exists elsewhere as text."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    if name in outcore.__all__ and node["reftarget"] != f"outcore.{name}":
        domain = environment.get_domain("py")
        return domain.resolve_xref(
            environment,
            node["refdoc"],
            environment.app.builder,
            node["reftype"],
            f"outcore.{name}",
            node,
            content,
        )
    return content if name in ALIASES or exists(node["reftarget"]) else None


def read_docstring(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: Any) -> None:
    """Link what docstrings name: pages, as `docs/bound.md`, and public errors."""

    def error(name: re.Match[str]) -> str:
        known = name[0] in outcore.__all__
        return f":py:exc:`~outcore.{name[0]}`" if known else name[0]

    for number, line in enumerate(lines):
        linked = re.sub(r"(?<![`\w])docs/([\w/-]+)\.md\b", r":doc:`\1`", line)
        lines[number] = re.sub(r"(?<![`.\w])[A-Z]\w+Error\b(?!`)", error, linked)


def exists(name: str) -> bool:
    """Whether Python finds `name`: a builtin, or a name of a module.

    Of `tuple[str, ...]` with a default, Sphinx looks for what stands before the comma.
    """
    module, _, attribute = name.partition("[")[0].rpartition(".")
    try:
        return hasattr(importlib.import_module(module or "builtins"), attribute)
    except ImportError:
        return False


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("missing-reference", find_name)
