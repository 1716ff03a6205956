"""pattern: the trace of a symbolic graph for further sizes, from the one for some sizes.

A copy of the graph with numbers, its rewriting and its capture take time for each op, but most of
what they find is the same for all sizes. A Pattern keeps that, and expressions for the numbers that
differ. What follows from numbers in other ways is decided anew for each size: which results are one
Value, which ops may write over an argument, which calls are rewritten because something is large.
If any of that turns out otherwise than in the trace at hand, the pattern has none for that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_aggregate

from outcore.capture.captured import Captured
from outcore.capture.compiler.compat import plain, without_autocast
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.memory import fits_over
from outcore.capture.nodes.storages import storage_id, tensors_in
from outcore.capture.rewrites import cross_entropy
from outcore.capture.rewrites.views import is_view
from outcore.capture.sizes.described import (
    Described,
    Numbers,
    SizedFloat,
    SizedInt,
    layout,
)
from outcore.capture.sizes.symbolic import Symbolic, Values
from outcore.ir.family import Family
from outcore.ir.trace import Buffer, Donation, Op, Trace, Value

Lie: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], Any, Any]
"""Shape, strides and offset of a tensor, and the bytes of its storage: numbers or expressions. The
bytes of an input's storage are those that are given."""

MAY_RAISE: Final = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What expressions and ops may raise. Expressions do if the inputs do not determine them."""


@dataclass(frozen=True, slots=True)
class OfInput:
    """The bytes of the storage of the input at this position among those that are tensors."""

    position: int


@dataclass(frozen=True, slots=True)
class At:
    """An argument or a result: the tensor with this number among `Pattern.lies`."""

    lie: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Rerun:
    """A call that is run at each size, as torch's word for it does not hold (`Copied.ran`)."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[At, ...]
    """Its results."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The trace of a symbolic graph, with expressions for the numbers that hang on sizes."""

    symbolic: Symbolic
    first: Captured
    """What was captured for the sizes that it was made from."""
    ops: tuple[Op, ...]
    """Those of that trace. Numbers that hang on sizes are SizedInt or SizedFloat."""
    sized: tuple[int, ...]
    """The ops that have such numbers."""
    lies: tuple[Lie | None, ...]
    """The ways in which tensors lie. None: as a rerun shows."""
    reruns: tuple[Rerun, ...]
    """What is run to know how its results lie."""
    lie_of: tuple[int, ...]
    """Value -> how it lies, as an index into `lies`."""
    same: frozenset[tuple[int, int]]
    """Pairs of lies that are the same: of one Value."""
    apart: frozenset[frozenset[int]]
    """Sets of lies that differ: of Values that differ in nothing else."""
    sides: frozenset[Any]
    """Sides that are expressions. If one is 0 or 1, tensors may lie otherwise: nothing is told."""
    wholes: tuple[int, ...]
    """Buffer -> how a tensor in it lies."""
    within: Mapping[int, int]
    """As `Captured.within`, with the Value on whose shape the bytes depend."""
    donations: tuple[tuple[Donation, bool], ...]
    """Where ops may write over an argument if both lie alike, and whether they do."""
    slices: tuple[tuple[int, int, bool, bool], ...]
    """As `Copied.slices`: how the whole lies and what is made, whether it takes all and is alike.
    """
    small: tuple[tuple[Described, Callable[[Tensor], bool]], ...]
    """As `Sites.small`."""
    settings: tuple[bool, ...]
    """Settings of torch on which it depends how calls are rewritten, and the effects of ops."""
    large: set[int]
    """As `Sites.large`: places in the graph, from all sizes so far."""
    were_large: frozenset[int]
    """The same when the pattern was made."""
    family: Family
    """That of the traces that it tells, once they are used."""

    @property
    def outdated(self) -> bool:
        """Whether other ops are captured now, or other effects."""
        return self.settings != settings() or self.large != self.were_large

    def at(self, args: Sequence[Any]) -> Captured | None:
        """What is captured for forward inputs like `args`, without its source.

        None if it is not known to be this.
        """
        if self.outdated:
            return None
        given = [plain(args[i]) for i in self.symbolic.given]
        values = Values(self.symbolic, args)
        try:
            lies = self._lies(values, [tensor.untyped_storage().nbytes() for tensor in given])
            ops = self._ops(values)
        except MAY_RAISE:  # the forward inputs do not determine some number, or an op refuses it
            return None
        trace = None if lies is None else self._trace(ops, lies, given)
        if trace is None:
            return None
        within = {op: block_bytes(trace.values[value]) for op, value in self.within.items()}
        return replace(self.first, trace=trace, within=within)

    def _ops(self, values: Values) -> tuple[Op, ...]:
        ops = list(self.ops)
        for op in self.sized:
            ops[op] = _resized(ops[op], values)
        return tuple(ops)

    def _trace(
        self, ops: tuple[Op, ...], lies: Sequence[Lie], given: Sequence[Tensor]
    ) -> Trace | None:
        first = self.first.trace
        if not self._is_alike(lies):
            return None
        values = tuple(map(_lying, first.values, (lies[i] for i in self.lie_of)))
        if not _are_as_told(given, [values[i] for i in first.inputs[: len(given)]]):
            return None
        buffers = tuple(
            Buffer(b.id, lies[whole][3], b.role, b.borrowed, b.name)
            for b, whole in zip(first.buffers, self.wholes, strict=True)
        )
        offsets = zip(values, first.values, strict=True)
        decided = (
            fits_over(donation, self.ops[donation.op].target, values, buffers) == fits
            for donation, fits in self.donations
        )
        if not all(decided) or any(bool(a.offset) != bool(b.offset) for a, b in offsets):
            return None
        return first.resized(buffers, values, ops)

    def _lies(self, values: Values, held: Sequence[int]) -> list[Lie] | None:
        """How tensors lie. None if a rerun shows that torch's word does not hold where it did."""
        numbers = values.sizes
        if any(numbers.of(side) <= 1 for side in self.sides):
            return None
        if any(large(_empty(known, numbers)) for known, large in self.small):
            return None
        lies: list[Any] = [lie and _evaluated(lie, numbers, held) for lie in self.lies]
        with as_kernels(), enable_python_dispatcher(), without_autocast(), torch.no_grad():
            for rerun in self.reruns:
                for at, shown in zip(rerun.made, _shown(rerun, lies, values), strict=True):
                    lies[at.lie] = lies[at.lie] or shown
                    if lies[at.lie] != shown:
                        return None
        return lies

    def _is_alike(self, lies: Sequence[Lie]) -> bool:
        """Whether all is decided as in the first trace, by how tensors lie."""
        return (
            all(lies[a][:3] == lies[b][:3] for a, b in self.same)
            and all(len({lies[i][:3] for i in group}) == len(group) for group in self.apart)
            and all(map(partial(_is_sliced, lies), self.slices))
        )


def _evaluated(lie: Lie, numbers: Numbers, held: Sequence[int]) -> Lie:
    shape, stride, offset, size = lie
    nbytes = held[size.position] if isinstance(size, OfInput) else numbers.of(size)
    return numbers.all(shape), numbers.all(stride), numbers.of(offset), nbytes


def _shown(rerun: Rerun, lies: Sequence[Lie], values: Values) -> list[Lie]:
    """How the results of a rerun lie. Views are as on any device, so no fake tensor is needed."""
    mode = None if is_view(rerun.target) else FakeTensorMode()

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, At):
            return _valued(leaf, values)
        shape, stride, offset, nbytes = lies[leaf.lie]
        storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        tensor = torch.empty(0, dtype=leaf.dtype, device="meta")
        tensor = tensor.set_(storage, offset, shape, stride)
        return tensor if mode is None else FakeTensor(mode, tensor, leaf.device)

    args, kwargs = map_aggregate((rerun.args, rerun.kwargs), given)
    with mode or no_python_dispatcher():  # which would describe views in torch's way
        made = rerun.target(*args, **kwargs)
    return [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        for t in tensors_in(made)
    ]


def _is_sliced(lies: Sequence[Lie], of: tuple[int, int, bool, bool]) -> bool:
    """Whether a slice is left out, and lies as what it is of, as it was in the first trace."""
    whole, made, left_out, alike = of
    takes_all = lies[whole][0] == lies[made][0]
    return left_out == takes_all and alike == (takes_all and lies[whole] == lies[made])


def _lying(value: Value, lie: Lie) -> Value:
    return Value(value.id, value.buffer, value.dtype, *lie[:3], value.conj, value.neg)


def _are_as_told(given: Sequence[Tensor], values: Sequence[Value]) -> bool:
    """Whether each of the tensors `given` has a storage of its own, and lies as its Value."""
    return len({storage_id(tensor) for tensor in given}) == len(given) and all(
        layout(tensor) == (*value.shape, *value.stride, value.offset)
        and not tensor.is_conj()
        and not tensor.is_neg()
        for tensor, value in zip(given, values, strict=True)
    )


def _resized(op: Op, values: Values) -> Op:
    args = tuple(_valued(arg, values) for arg in op.args)
    kwargs = tuple((name, _valued(arg, values)) for name, arg in op.kwargs)
    return replace(op, args=args, kwargs=kwargs)


def _valued(arg: Any, values: Values) -> Any:
    """An argument with the values of what is sized."""
    if isinstance(arg, tuple):
        return tuple(_valued(each, values) for each in arg)
    if not isinstance(arg, SizedInt | SizedFloat):
        return arg
    return values.of(arg.of) if isinstance(arg.of, Node) else values.sizes.of(arg.of)


def _empty(known: Described, numbers: Numbers) -> Tensor:
    """A tensor of the shape and dtype of what is `known`, without memory."""
    return torch.empty(numbers.all(known.shape), dtype=known.dtype, device="meta")


def block_bytes(value: Value) -> int:
    """The bytes that a call holds inside itself that makes `value` block by block."""
    dtype = getattr(torch, value.dtype)
    return cross_entropy.block_bytes(torch.empty(value.shape, dtype=dtype, device="meta"))


def settings() -> tuple[bool, ...]:
    """As `Pattern.settings`, as they are now."""
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch._C._get_mkldnn_enabled(),
    )
