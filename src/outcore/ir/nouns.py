"""The seven nouns in one place: what the text form and the files tell apart."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

from outcore.ir.hardware import Hardware
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Trace

Noun: TypeAlias = Hardware | Trace | Profile | Problem | Plan | Program | Timeline

N = TypeVar("N", bound=Noun)
"""One of the nouns, the same in argument and result."""


def kind_of(noun: type[Any]) -> str:
    """The word for a noun in headers and messages: `kind_of(Trace) == "trace"`."""
    return noun.__name__.lower()
