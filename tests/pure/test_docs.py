"""The documentation: links, policies, errors and public names are right; all code is run or marked.

tests/cpu/test_docs.py runs the code.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outcore
from outcore import errors
from outcore.policies import POLICIES
from tests import pages
from tests.pages import ROOT, blocks, name_of

CASES = ROOT / "tests" / "cases" / "errors"
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
by_page = pytest.mark.parametrize("page", pages.pages(), ids=name_of)


def words(text):
    return " ".join(text.split())


# ---- code ----------------------------------------------------------------------------------------


@by_page
def test_code_is_run_or_says_why_not(page):
    unknown = [
        f"{block.where}: {block.language!r}"
        for block in blocks(page)
        if not block.is_code and block.language not in pages.DATA
    ]
    assert not unknown, "neither run nor known as text; see tests/pages.py"


@by_page
def test_a_marker_stands_where_it_means_something(page):
    for block in blocks(page):
        for marker in block.markers:
            output = marker in ("figures vary", "not compared")
            assert block.is_output if output else block.is_code, f"{block.where}: {marker}"
        assert not (block.is_output and block.follows and not block.follows.runs and block.markers)


def test_what_is_not_run_is_listed(golden):
    found = [
        f"{name_of(page)}: {marker}: {words(block.markers[marker])}"
        for page in pages.pages()
        for block in blocks(page)
        for marker in (*pages.INSTEAD_OF_RUNNING, "not compared")
        if marker in block.markers
    ]
    count = sum(block.is_code for page in pages.pages() for block in blocks(page))
    left_out = sum(": not run: " in line for line in found)
    head = f"{left_out} of {count} blocks of code are not run\n"
    golden("\n".join([head, *found]), "docs/not_run")


def test_blocks_and_their_markers_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- run first: x = 1\ny = 2 -->\n<!-- not run: it is long -->\n"
        "```python\nprint(x)\n```\n\n<!-- figures vary: times -->\n```\n1.25 ms\n```\n\n"
        "Text.\n\n```\nno output\n```\n```{toctree}\nindex\n```\n",
        encoding="utf-8",
    )
    code, output, text = blocks(page)
    assert (code.line, code.language, code.text) == (7, "python", "print(x)\n")
    assert code.markers == {"run first": "x = 1\ny = 2", "not run": "it is long"}
    assert code.is_code
    assert not code.runs
    assert output.is_output
    assert not pages.differ(output, "13 s\n")
    assert "page.md:12 shows" in pages.differ(output, "nothing\n")
    digest = pages.Block(page, 1, "", "trace ..., bytes 1,024, then\n", {"figures vary": "digests"})
    assert not pages.differ(digest, "trace 8ab1, bytes 2,048, then\n")
    assert not text.is_output
    page.write_text("<!-- never run: x -->\n```python\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md:2: cannot read <!-- never run: x -->"):
        blocks(page)


def test_commands_of_a_block():
    text = "$ outcore floor --batch 2 \\\n  --json   # bytes\n\nmake demo\n# a comment\n"
    assert [words(line) for line in pages.commands(text)] == [
        "outcore floor --batch 2 --json",
        "make demo",
    ]


# ---- what pages name -----------------------------------------------------------------------------


@by_page
def test_links_lead_somewhere(page):
    lost = [target for target in pages.links(page) if not (page.parent / target).exists()]
    assert not lost


def test_every_policy_has_a_page_and_a_row_of_the_index():
    folder = ROOT / "docs" / "policies"
    index = (folder / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([a-z-]+)\]\(\1\.md\) \| \S", index, re.MULTILINE)
    assert sorted(rows) == sorted(POLICIES)
    assert {path.stem for path in folder.glob("*.md")} == {*POLICIES, "index"}
    for name in POLICIES:
        assert (folder / f"{name}.md").read_text(encoding="utf-8").startswith(f"# {name}\n")


def test_every_public_name_is_on_the_reference_page():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto\w+:: outcore\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == outcore.__all__


# ---- troubleshooting -----------------------------------------------------------------------------


def error_classes():
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            yield name


@pytest.mark.parametrize("name", sorted({*error_classes()} - {"OutcoreError"}))
def test_every_error_is_explained_with_its_message(name):
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", TROUBLESHOOTING, re.DOTALL | re.MULTILINE)
    assert section, f"docs/troubleshooting.md has no section on {name}"
    example = (CASES / f"{name}.txt").read_text(encoding="utf-8").removeprefix("outcore.errors.")
    assert words(example) in words(section[1])
    assert "**Try**" in section[1]


def warnings_of(path: Path) -> Iterator[str]:
    """The constant parts, of three words or more, of the warnings that a module issues."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and len(str(part.value).split()) > 2:
                    yield str(part.value).strip()


def test_every_warning_is_explained():
    said = [text for path in (ROOT / "src").rglob("*.py") for text in warnings_of(path)]
    assert len(said) > 3
    missing = [text for text in said if words(text) not in words(TROUBLESHOOTING)]
    assert not missing


def test_every_reason_for_running_in_core_is_explained():
    pattern = re.compile(r"CaptureError\(reason=f?\"([^\"{]+)")
    found = {
        reason.strip()
        for path in (ROOT / "src").rglob("*.py")
        for reason in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 5
    missing = sorted(text for text in found if words(text) not in words(TROUBLESHOOTING))
    assert not missing
