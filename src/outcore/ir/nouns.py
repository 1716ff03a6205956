"""nouns: the type of any noun, and its name in headers and messages."""

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
"""Some noun type: the same in argument and result."""


def kind_of(noun: type[Any]) -> str:
    """The name of a noun type in headers and messages: `kind_of(Trace) == "trace"`."""
    return noun.__name__.lower()
