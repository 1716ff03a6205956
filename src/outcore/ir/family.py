"""family: traces of one graph at several sizes, which differ in numbers alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable
from functools import wraps
from typing import Any, TypeVar

from outcore.ir.program import Program
from outcore.ir.trace import Trace

T = TypeVar("T")

_families: dict[int, Family] = {}
"""Id of a living trace -> its family."""


class Family:
    """What is known of all traces of a family. Lives as long as one of them."""

    def __init__(self, sized_ops: Collection[int]) -> None:
        self.sized_ops = frozenset(sized_ops)
        """Ops with arguments that are numbers, some of which hang on sizes."""
        self.known: dict[Hashable, Any] = {}
        """What is derived from one trace and is the same for all, by a key of who derived it."""
        self.programs: dict[Hashable, Program] = {}
        """Programs for one of the traces, by what else they depend on. Those for others differ in
        their slots alone."""

    def add(self, trace: Trace) -> None:
        """Add a trace. Its ops, buffers and values are those of the others, at other sizes."""
        number = id(trace)
        _families[number] = self
        weakref.finalize(trace, _families.pop, number, None).atexit = False

    def shares(self, program: Program) -> bool:
        """Whether all traces have a program with the body of this one."""
        return any(each.body is program.body for each in self.programs.values())


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
