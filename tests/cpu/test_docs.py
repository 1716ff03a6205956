"""All code in README.md and docs/ runs, page by page, and prints what the page shows.

tests/pages.py describes how a page marks exceptions.
"""

import ast
import contextlib
import gc
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outcore.cli import app
from outcore.runtime.graphs.obstacle import Obstacle
from tests import pages
from tests.pages import ROOT, blocks, name_of

WIDTH = "110"
"""Columns of the terminal that the pages show."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHERS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*pin_memory.*:UserWarning",
)
"""Filters for warnings that come from within the libraries that pages use."""
WITH_CODE = [page for page in pages.pages() if any(block.is_code for block in blocks(page))]


class Reader:
    """Runs the code of a page from top to bottom, in an empty folder."""

    def __init__(self, folder):
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def read(self, page):
        printed = ""
        for block in blocks(page):
            if block.is_output and block.follows.runs and "runs as" not in block.follows.markers:
                assert not (wrong := pages.differ(block, printed)), wrong
            elif block.language in pages.PYTHON:
                printed = self.python(block)
            elif block.language in pages.SHELL:
                printed = self.shell(block)

    def python(self, block):
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        if not block.runs:
            return ""
        smaller = block.markers.get("runs as")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block.markers.get("run first", ""), self.names)
            exec(code if smaller is None else smaller, self.names)
        return printed.getvalue()

    def shell(self, block):
        whole, smaller = list(pages.commands(block.text)), block.markers.get("runs as")
        if smaller or not block.runs:
            for command in whole:
                self.parse(command)
        running = pages.commands(smaller) if smaller else whole * block.runs
        return "".join(self.command(command, block) for command in running)

    def parse(self, command):
        """Check that `outcore` has the command and its options; other programs are not checked."""
        program, *arguments = shlex.split(command)
        found: Any = get_command(app) if program == "outcore" else None
        while found is not None:
            context = found.make_context(program, list(arguments), resilient_parsing=True)
            if not hasattr(found, "resolve_command"):
                found.make_context(program, arguments)
                return
            program, found, arguments = found.resolve_command(context, arguments)

    def command(self, command, block):
        where = block.where
        program, *arguments = shlex.split(command)
        if program == "outcore":
            result = CliRunner().invoke(app, arguments, prog_name="outcore")
            assert result.exit_code == block.exit_code, f"{where}: {command}\n{result.output}"
            return result.stdout
        if program == "pip":
            wanted = re.findall(r"\[(.*?)\]", " ".join(arguments))
            assert set(",".join(wanted).split(",")) - {""} <= set(EXTRAS), f"{where}: {command}"
            return ""
        if program == "make":  # a real run would install, train, or run these tests
            return self.run(["make", "--dry-run", *arguments], ROOT, where)
        if program in ("python", "python3"):
            return self.run([sys.executable, *arguments], self.folder, where)
        raise AssertionError(f"{where}: {command}: cannot run {program}; see tests/pages.py")

    def run(self, command, folder, where):
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{where}: {' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout


def import_out_of_sight(page):
    """Import what the page imports, hidden from readings of what the process holds.

    They visit each object that the garbage collector tracks, and most belong to imported modules.
    """
    for block in blocks(page):
        if block.language in pages.PYTHON and block.runs:
            for node in ast.parse(block.text).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    with contextlib.suppress(ImportError):  # a module that the page makes
                        exec(ast.unparse(node), {})
    gc.collect()
    gc.freeze()  # tests/cpu/conftest.py undoes it


@pytest.fixture
def _environment_stays():
    """Put back what pages and commands set."""
    before = os.environ.copy()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_environment_stays")
@pytest.mark.filterwarnings(*OTHERS)
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.chdir(tmp_path)
    import_out_of_sight(page)
    reader = Reader(tmp_path)
    try:
        reader.read(page)
    finally:  # FSDP2 keeps the classes of a page, and their code what the page has made
        for name in [name for name in reader.names if not name.startswith("__")]:
            del reader.names[name]


def test_code_that_fails_or_prints_something_else_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```\n2\n```\n")
    with pytest.raises(AssertionError, match="shows"):
        Reader(tmp_path).read(page)
    page.write_text("```sh\nrm -r everything\n```\n")
    with pytest.raises(AssertionError, match="cannot run rm"):
        Reader(tmp_path).read(page)
    page.write_text("<!-- not run: a test -->\n```sh\noutcore compare --netwrk x\n```\n")
    with pytest.raises(Exception, match="No such option"):
        Reader(tmp_path).read(page)


def test_python_that_something_smaller_stands_for_is_only_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page, reader = tmp_path / "page.md", Reader(tmp_path)
    page.write_text("<!-- runs as: steps = 2 -->\n```python\nsteps = 10**9\n```\n\n```\n9\n```\n")
    reader.read(page)
    assert reader.names["steps"] == 2
    page.write_text("<!-- runs as: steps = 2 -->\n```python\nsteps = (\n```\n")
    with pytest.raises(SyntaxError):
        reader.read(page)


def test_what_keeps_steps_from_being_metered_is_explained():
    told = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert all(f"`{each.reason.partition(': ')[0]}`" in told for each in Obstacle)
