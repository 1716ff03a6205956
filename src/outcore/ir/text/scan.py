"""scan: the tokens of the text form, a cursor over one line, and quoting."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import NoReturn, TypeVar

from outcore.errors import ParseError
from outcore.ir.hardware import Tier

E = TypeVar("E", bound=Enum)

NAME = re.compile(r"\w[\w.:-]*", re.ASCII)
"""A name that needs no quotes: a target, a dtype, a digest."""
KIND = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""A keyword or the kind of a symbol that needs no quotes."""
SYMBOL = re.compile(r"\w[\w.:+-]*", re.ASCII)
"""The name of a symbol that needs no quotes: what follows `dtype:`."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
DIGITS = r"\d{1,600}(?![\w-])"
"""No letter, digit or hyphen may follow without a space. Python reads at least 640 digits."""
INTEGER = re.compile(rf"-?{DIGITS}", re.ASCII)
NUMBER = re.compile(r"nan\b|-?(?:inf\b|\d{1,600}(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.])", re.ASCII)
_SPACES = re.compile(" *")
_WORD = re.compile(r"\w")


def quoted(text: str) -> str:
    """`text` as a JSON string: any characters, on one line, in ASCII."""
    return json.dumps(text)


def bare(text: str, pattern: re.Pattern[str] = NAME) -> str:
    """`text` unquoted if `pattern` matches all of it, else quoted."""
    return text if pattern.fullmatch(text) else quoted(text)


class Line:
    """A cursor over one line. Every method first skips spaces, and moves past what it reads."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.line_number = text.rstrip(), number
        self.at = 0
        self.values: list[tuple[int, int]] = []
        """The Value ids read so far, as (column, id). Columns count from 0."""

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        """Raise ParseError at the cursor, or at column `at` (from 0)."""
        column = 1 + (self.at if at is None else at)
        raise ParseError(reason=reason, line=self.line_number, column=column, text=self.text)

    def miss(self, expected: str) -> NoReturn:
        """Raise ParseError: what is `expected` is not here."""
        self.find(_SPACES)
        found = self.text[self.at : self.at + 20]
        self.fail(f"expected {expected}, found {found!r}" if found else f"expected {expected}")

    def done(self) -> bool:
        """Whether nothing is left on the line."""
        return not self.text[self.at :].strip()

    def sees(self, pattern: re.Pattern[str]) -> bool:
        """Whether `pattern` matches here. The cursor does not move."""
        start = self.at
        seen = self.find(pattern) is not None
        self.at = start
        return seen

    def find(self, pattern: re.Pattern[str]) -> str | None:
        """What `pattern` matches here; None if it does not match."""
        while self.text.startswith(" ", self.at):
            self.at += 1
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def take(self, pattern: re.Pattern[str], expected: str) -> str:
        """What `pattern` matches here. Raises ParseError if it does not match."""
        found = self.find(pattern)
        if found is None:
            self.miss(expected)
        return found

    def accept(self, token: str) -> bool:
        """Move past `token` if it is here. A word must end there. Returns whether it was here."""
        self.find(_SPACES)
        stop = self.at + len(token)
        if not self.text.startswith(token, self.at):
            return False
        if token[-1].isalnum() and _WORD.match(self.text, stop):
            return False
        self.at = stop
        return True

    def expect(self, *tokens: str) -> None:
        """Move past `tokens`. Raises ParseError if one is missing."""
        for token in tokens:
            if not self.accept(token):
                self.miss(repr(token))

    def end(self) -> None:
        """Raise ParseError unless the line ends here."""
        if not self.done():
            self.miss("the end of the line")

    def integer(self) -> int:
        """An int in decimal."""
        return int(self.take(INTEGER, "an integer"))

    def integers(self, prefix: str = "") -> tuple[int, ...]:
        """All ints from here on, each after `prefix`: `s3 s4`."""
        pattern = re.compile(re.escape(prefix) + INTEGER.pattern)
        found = []
        while (item := self.find(pattern)) is not None:
            found.append(int(item.removeprefix(prefix)))
        return tuple(found)

    def integers_after(self, word: str, prefix: str = "") -> tuple[int, ...]:
        """The ints after `word`, at least one; none if `word` is not here."""
        if not self.accept(word):
            return ()
        return self.integers(prefix) or self.miss(f"what comes after {word!r}")

    def number(self) -> float:
        """A float as `repr` prints it."""
        return float(self.take(NUMBER, "a number"))

    def nbytes(self) -> int:
        """A size: `4096 B`."""
        size = self.integer()
        self.expect("B")
        return size

    def seconds(self) -> float:
        """A time: `0.25 s`."""
        time = self.number()
        self.expect("s")
        return time

    def tier_bytes(self) -> tuple[Tier, int]:
        """A tier and a size: `host 4096 B`."""
        return self.member(Tier), self.nbytes()

    def string(self) -> str | None:
        """A quoted string; None if there is none here."""
        found = self.find(STRING)
        if found is None:
            return None
        try:
            text = json.loads(found)
        except ValueError as error:
            self.fail(f"not a JSON string: {error}", self.at - len(found))
        return str(text)

    def name(self, pattern: re.Pattern[str] = NAME) -> str:
        """A bare or a quoted name."""
        found = self.string()
        return self.take(pattern, "a name") if found is None else found

    def member(self, kind: type[E]) -> E:
        """A member of an Enum by its value."""
        start, members = self.at, {member.value: member for member in kind}
        word = self.find(KIND)
        if word not in members:
            self.at = start
            self.miss(" or ".join(members))
        return members[word]
