"""pages: split the documentation's pages into blocks of code, so that each can be run.

All code on a page runs, in order, in one namespace. A fence without a language directly below a
block of code shows exactly what the block prints; `...` stands for any text. An HTML comment above
a fence, which readers do not see, changes that:

    <!-- not run: needs a GPU -->       the block is not run; the reason
    <!-- runs as: outcore ... -->       something smaller runs instead; the code is only parsed
    <!-- run first: model = Net() -->   this Python runs before the block; it may have many lines
    <!-- exit code: 1, they differ -->  its commands end with this exit code, not 0; the reason
    <!-- figures vary: times -->        numbers and their units are not compared; the reason
    <!-- not compared: it is long -->   the output is not compared; the reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = ("python",)
SHELL = ("sh", "bash", "console")
OUTPUT = ("", "text")
DATA = (*OUTPUT, "csv", "diff", "html", "ini", "json", "markdown", "toml", "yaml")
"""Languages of blocks that are shown and not run."""
INSTEAD_OF_RUNNING = ("not run", "runs as")
MARKERS = (*INSTEAD_OF_RUNNING, "run first", "exit code", "figures vary", "not compared")

_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*).*")
_MARKER = re.compile(rf"(?P<name>{'|'.join(MARKERS)}):\s+(?P<text>\S.*)", re.DOTALL)
_QUANTITY = re.compile(r"[+-]?\d+(,\d+)*(\.\d+)?(e[+-]?\d+)?( ?([KMG]iB|B|s|ms|us|ns)\b)?(/s\b)?")
_RULES = re.compile(r"([━─═])\1*")


@dataclass
class Block:
    """A fenced block: its place, its text, and the comments on it."""

    page: Path
    line: int
    """Line number of its first line of code, from 1."""
    language: str
    text: str
    markers: dict[str, str] = field(default_factory=dict)
    follows: Block | None = None
    """The block directly above, with only comments in between; else None."""

    @property
    def is_code(self) -> bool:
        return self.language in (*PYTHON, *SHELL)

    @property
    def runs(self) -> bool:
        return self.is_code and "not run" not in self.markers

    @property
    def exit_code(self) -> int:
        """The exit code that its commands should end with."""
        return int(self.markers.get("exit code", "0").partition(",")[0])

    @property
    def is_output(self) -> bool:
        """Whether it shows the output of the block above."""
        return self.language in OUTPUT and self.follows is not None and self.follows.is_code

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README and similar pages, and docs/ without the stubs that docs/conf.py fills with them."""
    stubs = {ROOT / "docs" / f"{name}.md" for name in ("readme", "changelog", "contributing")}
    found = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}
    return sorted(found - stubs)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, without MyST directives."""
    found: list[Block] = []
    between: list[str] = []
    last: Block | None = None
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        fence = _FENCE.fullmatch(line)
        if fence is None:
            between.append(line)
            continue
        inside = []
        for _, other in lines:
            if other.strip() == fence["ticks"]:
                break
            inside.append(other.removeprefix(fence["indent"]))
        comments, bare = _comments_above(between)
        markers = _markers(comments, f"{page.relative_to(ROOT)}:{number}")
        block = Block(
            page,
            number + 1,
            fence["language"],
            "\n".join([*inside, ""]),
            markers,
            last if bare else None,
        )
        if not block.language.startswith("{"):
            found.append(block)
        between, last = [], block
    return found


def _comments_above(lines: list[str]) -> tuple[list[str], bool]:
    """The comments at the end of the text above a fence, and whether that text has only those."""
    text = "\n".join(lines)
    comments: list[str] = []
    while text.rstrip().endswith("-->"):
        text, _, comment = text.rstrip().removesuffix("-->").rpartition("<!--")
        comments.insert(0, comment.strip())
    return comments, not text.strip()


def _markers(comments: list[str], where: str) -> dict[str, str]:
    found = {}
    for comment in comments:
        marker = _MARKER.fullmatch(comment)
        if marker is None:
            raise ValueError(f"{where}: cannot read <!-- {comment} -->; see tests/pages.py")
        found[marker["name"]] = marker["text"]
    return found


def commands(text: str) -> Iterator[str]:
    """The commands of a shell block one by one, without prompts and comments."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip()
        if command:
            yield command


def differ(shown: Block, printed: str) -> str:
    """How the output on a page differs from `printed`, as text; empty if it does not."""
    if "not compared" in shown.markers:
        return ""
    mask = _masked if "figures vary" in shown.markers else str
    checker, flags = OutputChecker(), ELLIPSIS | NORMALIZE_WHITESPACE
    if checker.check_output(mask(shown.text), mask(printed), flags):
        return ""
    return f"{shown.where} shows\n{shown.text}\nand this is printed\n{printed}"


def _masked(text: str) -> str:
    """`text` without numbers, their units, and the widths of tables."""
    return _RULES.sub(r"\1", _QUANTITY.sub("#", text))


def links(page: Path) -> Iterator[str]:
    """The relative targets that a page links to, without anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        if path and ":" not in path:
            yield path
