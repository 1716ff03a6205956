"""Trace: one captured training step as a list of ops over buffers.

A Buffer is one storage: this is what is planned and moved. A Value is a strided view onto a
buffer. Values are never moved; they are rebuilt from their buffer. Ops are in execution order:
those before `boundary` run in the forward call, the others in the backward call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TypeAlias

from outcore.errors import VerifyError


class Role(Enum):
    """What a buffer is for in the training step."""

    INPUT = "input"
    PARAM = "param"
    STATE = "state"
    ACTIVATION = "activation"
    GRAD = "grad"


class Phase(Enum):
    """The part of the training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Effect(Enum):
    """What an op does in addition to computing its outputs from its inputs."""

    RANDOM = "random"
    """Draws random numbers: a rerun needs the generator state of the first run."""
    MUTATES = "mutates"
    """Writes into one of its inputs: never runs again."""
    COLLECTIVE = "collective"
    """Communicates with other processes: is waited for, and never runs again."""
    UNREPEATABLE = "unrepeatable"
    """A second run might not give the same bits: never runs again."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One storage of `nbytes`. If `borrowed`, the caller owns it, and it stays on the device."""

    id: int
    nbytes: int
    role: Role
    borrowed: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """A strided view onto a buffer: shape, stride and offset in elements of `dtype`.

    `conj`, `neg`: the bytes are read as their complex conjugate, as their negative.
    """

    id: int
    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the Value with this id."""

    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a named constant of the framework, such as `dtype float32`.

    Complex numbers are Symbols too, such as `complex 1j`.
    """

    kind: str
    name: str


Arg: TypeAlias = "bool | int | float | str | Ref | Symbol | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Op:
    """One call of `target`.

    `outputs` has a Value id per result, or None for a result that is not returned. `site` says
    where in the model the call comes from; it is used in messages only.
    """

    id: int
    target: str
    args: tuple[Arg, ...]
    outputs: tuple[int | None, ...]
    phase: Phase
    kwargs: tuple[tuple[str, Arg], ...] = ()
    effects: frozenset[Effect] = frozenset()
    site: str = ""

    @property
    def arguments(self) -> tuple[Arg, ...]:
        """All arguments: first the positional ones, then the values of the keyword ones."""
        return (*self.args, *(arg for _, arg in self.kwargs))

    @property
    def repeatable(self) -> bool:
        """Whether a rerun gives the results of the first run. RANDOM is the only effect allowed."""
        return not self.effects - {Effect.RANDOM}


@dataclass(frozen=True, slots=True)
class Donation:
    """Op `op` may write its result `target` over its argument `source` (both Value ids)."""

    op: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Trace:
    """The captured step.

    `inputs` and `tangents` are the ids of the Values that the caller passes to the forward and to
    the backward call. `outputs` and `gradients` are what the two calls return: each item is a Ref
    or a plain constant.

    Raises VerifyError if it names a Value that it does not list, because the derived fields need
    all of them. `verify_trace` checks all other rules.
    """

    buffers: tuple[Buffer, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    boundary: int
    inputs: tuple[int, ...]
    outputs: tuple[Arg, ...]
    tangents: tuple[int, ...] = ()
    gradients: tuple[Arg, ...] = ()
    donations: tuple[Donation, ...] = ()

    reads: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Derived: per op, the buffers it reads, each once, in argument order."""
    writes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Derived: per op, the buffers it makes, each once, in the order of its outputs."""

    def __post_init__(self) -> None:
        self._verify_named()
        reads = tuple(self._buffers(refs(op.arguments)) for op in self.ops)
        made = (self._buffers(Ref(v) for v in op.outputs if v is not None) for op in self.ops)
        writes = tuple(
            tuple(b for b in out if b not in read) for read, out in zip(reads, made, strict=True)
        )
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "writes", writes)

    def resized(
        self,
        buffers: tuple[Buffer, ...],
        values: tuple[Value, ...],
        ops: tuple[Op, ...],
    ) -> Trace:
        """The same trace at other sizes. Nothing is verified: only numbers may differ."""
        made = object.__new__(Trace)
        changed = {"buffers": buffers, "values": values, "ops": ops}
        for name in (each.name for each in fields(self)):
            object.__setattr__(made, name, changed.get(name, getattr(self, name)))
        return made

    def _verify_named(self) -> None:
        """Raise VerifyError if a Value is named that is not listed."""
        for op in self.ops:
            self._verify_listed(f"op {op.id}", (ref.value for ref in refs(op.arguments)))
            self._verify_listed(f"op {op.id}", (v for v in op.outputs if v is not None))
        self._verify_listed("inputs", self.inputs)
        self._verify_listed("tangents", self.tangents)
        self._verify_listed("outputs", (ref.value for ref in refs(self.outputs)))
        self._verify_listed("gradients", (ref.value for ref in refs(self.gradients)))
        for donation in self.donations:
            self._verify_listed("donations", (donation.source, donation.target))

    def _verify_listed(self, where: str, named: Iterable[int]) -> None:
        for value in named:
            if not 0 <= value < len(self.values):
                rule = "every value that is named is listed"
                detail = f"it names %{value}, and there are {len(self.values)} values"
                raise VerifyError(noun="trace", rule=rule, where=where, detail=detail)

    def _buffers(self, used: Iterable[Ref]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.values[ref.value].buffer for ref in used))

    def value_buffers(self, arg: Arg) -> tuple[int, ...]:
        """The buffers behind every Value in `arg`, each once, in order."""
        return self._buffers(refs(arg))


def refs(arg: Arg) -> Iterator[Ref]:
    """Every Ref inside `arg`, depth first."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)
