"""rows: build the lines of a text form, and read lines into items by their first word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from outcore.ir.text.scan import KIND, Line, bare

Lines: TypeAlias = Sequence[Line]
Rows: TypeAlias = dict[str, tuple[Any, ...]]


def row(*words: str) -> str:
    """One line of the words that are not empty."""
    return " ".join(word for word in words if word)


def comma(items: Iterable[str]) -> str:
    """The items, separated by commas."""
    return ", ".join(items)


def named(word: str, text: str) -> str:
    """`word text`, or nothing if `text` is empty."""
    return f"{word} {bare(text)}" if text else ""


def read_rows(
    lines: Lines, readers: Mapping[str, Callable[[Line], Any]], once: Collection[str] = ()
) -> Rows:
    """The items of all lines, by each line's first word. A word in `once` may begin one line."""
    rows: dict[str, list[Any]] = {word: [] for word in readers}
    for line in lines:
        word = line.find(KIND) or ""
        if word not in readers:
            line.at = 0
            line.miss(" or ".join(readers))
        if word in once and rows[word]:
            line.fail(f"a second line of {word}", 0)
        try:
            rows[word].append(readers[word](line))
        except RecursionError:
            line.fail("too many brackets, one inside the other")
        line.end()
    return {word: tuple(items) for word, items in rows.items()}


def only(rows: Rows, word: str, default: Any) -> Any:
    """The one item of `word`, or `default` if no line began with it."""
    return rows[word][0] if rows[word] else default
