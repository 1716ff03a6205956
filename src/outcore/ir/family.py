"""family: traces of one graph at several sizes, which differ in numbers alone."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from outcore.ir.program import Program
from outcore.ir.trace import Trace

T = TypeVar("T")

_families: dict[int, Family] = {}
"""Id of a living trace -> its family."""


LENT = 8
"""Programs that are remembered as lent."""


@dataclass(frozen=True, slots=True)
class SharedProgram:
    """A program for one trace of a family, whose body others share."""

    program: Program
    code: dict[Hashable, Any] = field(default_factory=dict)
    """Its code, by how it was instrumented."""


class Family:
    """What is known of all traces of a family. Lives as long as one of them."""

    def __init__(self, sized_ops: Collection[int]) -> None:
        self.sized_ops = frozenset(sized_ops)
        """Ops with arguments that are numbers, some of which hang on sizes."""
        self.known: dict[Hashable, Any] = {}
        """What is derived from one trace and is the same for all, by a key of who derived it."""
        self.kept: dict[Hashable, SharedProgram] = {}
        """The program that keeps everything, by how the bytes of slots are rounded."""
        self.floor: SharedProgram | None = None
        """The latest floor program. It goes from larger sizes to smaller ones."""
        self.lent: deque[SharedProgram] = deque(maxlen=LENT)
        """Other programs that do, the latest last."""

    def add(self, trace: Trace) -> None:
        """Add a trace. Its ops, buffers and values are those of the others, at other sizes."""
        number = id(trace)
        _families[number] = self
        weakref.finalize(trace, _families.pop, number, None).atexit = False

    def lend(self, program: Program) -> None:
        """Note that other traces have programs with the body of this one."""
        if self.code_of(program) is None:
            self.lent.append(SharedProgram(program))

    def code_of(self, program: Program) -> dict[Hashable, Any] | None:
        """The code of a program that others share; None for other programs."""
        shared = (*self.kept.values(), self.floor, *self.lent)
        return next((s.code for s in shared if s and s.program.body is program.body), None)


def family_of(trace: Trace) -> Family | None:
    """The family of a trace; None if it has none."""
    return _families.get(id(trace))


def once_per_family(make: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Let `make` run once for each family. What it returns must not depend on sizes.

    For a trace without a family, it runs each time.
    """

    @wraps(make)
    def once(trace: Trace) -> T:
        family = family_of(trace)
        if family is None:
            return make(trace)
        if make not in family.known:
            family.known[make] = make(trace)
        found: T = family.known[make]
        return found

    return once
