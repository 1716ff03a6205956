"""source: the generated text of a program, and what it does in addition to the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outcore.execute.codegen.numbers import Number
from outcore.ir.trace import Phase


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a generated program does in addition to the step: nothing, by default."""

    timed: bool = False
    """Call `note(position, start, stop)` after each Run, with readings of the clock around it."""
    checked: tuple[Phase, ...] = ()
    """Call `check(op, results, arguments)` after the first Run of each op of these phases."""
    poisoned: bool = False
    """Call `discard(tensor)` before memory is freed."""


NONE = Instruments()


@dataclass(slots=True)
class StepSource:
    """The generated text of both functions."""

    forward: str
    backward: str
    names: dict[str, object] = field(default_factory=dict)
    """The globals that the text needs, besides those that `build` adds."""
    bound: dict[str, Callable[..., object]] = field(default_factory=dict)
    """Global -> the function that it is, bound to the trace as its first argument."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Global -> where the trace says which number it is."""
    private: tuple[int, ...] = ()
    """Positions in what crosses of the tensors that only outcore holds (`ir.memory`)."""
    copies: tuple[int, ...] = ()
    """Positions in what crosses of the handles of copies."""
