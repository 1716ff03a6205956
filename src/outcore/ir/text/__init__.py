"""text: the text form of every noun, printed for reading and parsed for tests and edited files.

docs/ir.md has the grammar. `parse(to_text(noun), type(noun)) == noun`, floats to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from outcore.errors import ParseError
from outcore.ir.hardware import Hardware
from outcore.ir.nouns import N, Noun, kind_of
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.text.plan import print_plan, read_plan
from outcore.ir.text.problem import (
    print_hardware,
    print_problem,
    print_profile,
    read_hardware,
    read_problem,
    read_profile,
)
from outcore.ir.text.program import instruction_text, print_program, read_program
from outcore.ir.text.rows import Lines
from outcore.ir.text.scan import Line
from outcore.ir.text.timeline import print_timeline, read_timeline
from outcore.ir.text.trace import op_text, print_trace, read_trace
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Trace

__all__ = ["instruction_text", "op_text", "parse", "to_text"]


def to_text(noun: Noun) -> str:
    """The text form of `noun`: a header line, then one line per item."""
    printer, _ = _FORMS[type(noun)]
    return "\n".join(printer(noun)) + "\n"


def parse(text: str, kind: type[N]) -> N:
    """The noun of type `kind` in `text`, its text form. Raises ParseError if it is not one.

    Blank lines and lines that begin with # are ignored. The noun is not verified: a trace whose ops
    are out of order can be parsed, and `verify_trace` rejects it.
    """
    lines = [
        Line(line, number)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise ParseError(reason=f"expected a {kind_of(kind)}, found nothing", line=1, column=1)
    _, reader = _FORMS[kind]
    noun: N = reader(lines)
    return noun


_FORMS: dict[type[Any], tuple[Callable[[Any], Iterator[str]], Callable[[Lines], Any]]] = {
    Hardware: (print_hardware, read_hardware),
    Plan: (print_plan, read_plan),
    Problem: (print_problem, read_problem),
    Profile: (print_profile, read_profile),
    Program: (print_program, read_program),
    Timeline: (print_timeline, read_timeline),
    Trace: (print_trace, read_trace),
}
