"""operands: what generated code passes to ops, as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from outcore import aten
from outcore.execute.codegen.numbers import Number
from outcore.execute.laid import laid, reinterpret
from outcore.ir.family import Family
from outcore.ir.trace import Arg, Op, Ref, Symbol, Trace, Value

_LIE: Final = "shape", "stride", "offset"
"""What says how a Value lies in its buffer."""


class Operands:
    """Writes arguments and views; `family`: that of the trace, if the text is for all its traces.

    Collects the globals that the text needs.
    """

    def __init__(self, trace: Trace, family: Family | None) -> None:
        self.trace, self.family = trace, family
        self.slot_of: dict[int, int] = {}
        """Buffer -> slot, for the arguments and results of the line being written."""
        self.roots = root_values(trace)
        """Per buffer, the Value that its slot's tensor has."""
        self.names: dict[str, object] = {}
        """Globals of the generated text."""
        self._numbers: dict[Number, str] = {}
        """Where a number comes from -> its name."""
        self._ops: dict[str, str] = {}
        """Overload -> its name in the text."""

    @property
    def numbers(self) -> dict[str, Number]:
        """As `StepSource.numbers`."""
        return {name: number for number, name in self._numbers.items()}

    def made(self, value: int | None) -> str:
        """The name of the slot of a result; "None" for a result that is not returned."""
        return "None" if value is None else f"s{self.slot_of[self.trace.values[value].buffer]}"

    def laid(self, call: str, op: Op) -> str:
        """`call`, with its result at the captured offset in a storage of the captured size."""
        made = op.outputs[0]
        assert made is not None  # noqa: S101 - the op has no other result
        value = self.trace.values[made]
        numbers = (("nbytes", value.buffer), *((name, value.id) for name in _LIE))
        self.names["laid"] = laid
        return f"laid({call}, {', '.join(self.number(Number(*each)) for each in numbers)})"

    def name(self, overload: torch._ops.OpOverload) -> str:
        """The name of `overload` in the text."""
        key = str(overload)
        if key not in self._ops:
            self._ops[key] = f"o{len(self._ops)}"
            self.names[self._ops[key]] = aten.callable_of(overload)
        return self._ops[key]

    def number(self, number: Number) -> str:
        """A number, or several, as text: by name if the text is for several sizes."""
        if self.family is None:
            return repr(number.of_trace(self.trace))
        return self._numbers.setdefault(number, f"n{len(self._numbers)}")

    def args(self, op: Op) -> list[str]:
        """The arguments of a call, as text."""
        if self.family is None or op.id not in self.family.sized_ops:
            args = [self.arg(a) for a in op.arguments]
        else:
            numbered = enumerate(op.arguments)
            args = [self._sized(a, Number("arg", op.id, (i,))) for i, a in numbered]
        named = len(op.args)
        keywords = (name for name, _ in op.kwargs)
        return args[:named] + [f"{k}={a}" for k, a in zip(keywords, args[named:], strict=True)]

    def _sized(self, arg: Arg, number: Number) -> str:
        """An argument that may hang on sizes; `number`: where it is."""
        if isinstance(arg, tuple):
            numbered = enumerate(arg)
            parts = (self._sized(a, replace(number, at=(*number.at, i))) for i, a in numbered)
            return "[" + ", ".join(parts) + "]"
        is_number = isinstance(arg, int | float) and not isinstance(arg, bool)
        return self.number(number) if is_number else self.arg(arg)

    def arg(self, arg: Arg) -> str:
        """An argument of an op, as text."""
        if isinstance(arg, Ref):
            return self._value(self.trace.values[arg.value])
        if isinstance(arg, tuple):
            return "[" + ", ".join(map(self.arg, arg)) + "]"
        if isinstance(arg, Symbol):
            return self._symbol(arg)
        if isinstance(arg, float):
            return f"float({str(arg)!r})" if arg - arg != 0 else repr(arg)
        return repr(arg)

    def _symbol(self, symbol: Symbol) -> str:
        """A symbol of torch, as text."""
        if symbol.kind == "device":
            self.names["device"] = torch.device
            return f"device({symbol.name!r})"
        if symbol.kind == "complex":
            return f"complex({symbol.name!r})"
        self.names[f"{symbol.kind}_{symbol.name}"] = getattr(torch, symbol.name)
        return f"{symbol.kind}_{symbol.name}"

    def _value(self, value: Value) -> str:
        """The tensor in the buffer's slot or a view of it, as text."""
        text = self._laid_out(value)
        for turned, name, function in (
            (value.conj, "conjugate", torch._conj),  # noqa: SLF001 - torch.conj leaves reals alone
            (value.neg, "negative", torch._neg_view),  # noqa: SLF001 - torch has no other
        ):
            if turned:
                self.names[name] = function
                text = f"{name}({text})"
        return text

    def _laid_out(self, value: Value) -> str:
        """The same without conjugation and negation."""
        slot = f"s{self.slot_of[value.buffer]}"
        root = self.roots[value.buffer]
        if lies_as(value, root):
            return slot
        shape, stride = (self.number(Number(name, value.id)) for name in _LIE[:2])
        if value.dtype == root.dtype:
            self.names["view"] = torch.as_strided
            return f"view({slot}, {shape}, {stride}, {self._start(value, root)})"
        self.names["reinterpret"] = reinterpret
        dtype = self._symbol(Symbol("dtype", value.dtype))
        after = self.number(Number("bytes_after", value.id, (root.id,)))
        return f"reinterpret({slot}, {dtype}, {shape}, {stride}, {after})"

    def _start(self, value: Value, root: Value) -> str:
        """Where a view begins, as text."""
        if root.offset == 0 and not self.trace.buffers[value.buffer].borrowed:
            return self.number(Number("offset", value.id))
        start = f"s{self.slot_of[value.buffer]}.storage_offset()"
        if value.offset != root.offset or (self.family is not None and root.offset):
            start += f" + {self.number(Number('delta', value.id, (root.id,)))}"
        return start


def root_values(trace: Trace) -> list[Value]:
    """Per buffer, the Value that its op returns or that the caller passes."""
    roots: dict[int, Value] = {}
    for value in trace.values:
        roots.setdefault(value.buffer, value)
    return [roots[b.id] for b in trace.buffers]


def lies_as(value: Value, root: Value) -> bool:
    """Whether both are the same part of a buffer, read in the same order."""
    return (value.dtype, value.shape, value.stride, value.offset) == (
        root.dtype,
        root.shape,
        root.stride,
        root.offset,
    )
