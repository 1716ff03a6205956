"""pattern: the trace of a symbolic graph for further sizes, from the one for some sizes.

A copy of the graph with numbers, its rewriting and its capture take time for each op, but most of
what they find is the same for all sizes. A Pattern keeps that, and expressions for the numbers that
differ. What follows from numbers in other ways is decided anew for each size: which results are one
Value, which ops may write over an argument, which calls are rewritten because something is large.
If any of that turns out otherwise than in the trace at hand, the pattern has none for that size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from outcore import aten
from outcore.capture.compiler.compat import plain, without_autocast
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.graph import Captured, Joint, fits_over
from outcore.capture.nodes.call_memory import BYTES
from outcore.capture.rewrites import convolution, cross_entropy
from outcore.capture.rewrites.metadata_only import INPUT
from outcore.capture.rewrites.views import is_view
from outcore.capture.sizes.described import (
    SYMBOLS,
    Described,
    Numbers,
    SizedFloat,
    SizedInt,
    layout,
    sized,
)
from outcore.capture.sizes.symbolic import Copied, Ran, Symbolic, Values
from outcore.capture.source import Rewritten, Source
from outcore.errors import CaptureError
from outcore.ir.family import Family
from outcore.ir.trace import Arg, Buffer, Donation, Op, Ref, Trace, Value, refs

Lie: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], Any, Any]
"""Shape, strides and offset of a tensor, and the bytes of its storage: numbers or expressions. The
bytes of an input's storage are those that are given."""

_PASSED_ON: Final = frozenset({convolution.BACKWARD, cross_entropy.GRADIENT})
"""Calls that passes make: their numbers are those of the calls that they replace."""

_MAY_RAISE: Final = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What expressions and ops may raise. Expressions do if the inputs do not determine them."""


class _UnfitError(Exception):
    """Some number of a trace is not known to be the value of an expression."""


def pattern_of(
    symbolic: Symbolic, copied: Copied, rewritten: Rewritten, source: Source
) -> Pattern | None:
    """The pattern of `source`, made from a copy of `symbolic`, and not corrected yet.

    None if some number in its trace is not explained.
    """
    try:
        return _Drawn(symbolic, copied, rewritten, source.captured).pattern()
    except (_UnfitError, *_MAY_RAISE):  # it has something that nobody thought of
        return None


@dataclass(frozen=True, slots=True)
class _OfInput:
    """The bytes of the storage of the input at this position among those that are tensors."""

    position: int


@dataclass(frozen=True, slots=True)
class _At:
    """An argument or a result: the tensor with this number among `Pattern.lies`."""

    lie: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Rerun:
    """A call that is run at each size, as torch's word for it does not hold (`Copied.ran`)."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[_At, ...]
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
    reruns: tuple[_Rerun, ...]
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
        return self.settings != _settings() or self.large != self.were_large

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
        except _MAY_RAISE:  # the forward inputs do not determine some number, or an op refuses it
            return None
        trace = None if lies is None else self._trace(ops, lies, given)
        if trace is None:
            return None
        within = {op: _block_bytes(trace.values[value]) for op, value in self.within.items()}
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


class _Drawn:
    """Finds the expressions in what was captured of a copy."""

    def __init__(
        self, symbolic: Symbolic, copied: Copied, rewritten: Rewritten, captured: Captured
    ) -> None:
        self.symbolic, self.copied, self.rewritten = symbolic, copied, rewritten
        self.captured, self.trace, self.joint = captured, captured.trace, captured.source()
        self.numbers: dict[Lie | int, int] = {}
        """How tensors lie, or the id of one that lies otherwise than described -> its number."""
        self.lies_of: list[list[int]] = [[] for _ in self.trace.values]
        """Value -> the lies that it was described with."""
        self.wholes = [-1] * len(self.trace.buffers)
        """As `Pattern.wholes`."""
        given = (symbolic.primals[i] for i in symbolic.given)
        self.given = {symbolic.described[n].storage: _OfInput(i) for i, n in enumerate(given)}
        """Storages of the forward inputs, as in a Described."""
        self.shown: set[int] = set()
        """Ids of the fake tensors that reruns make."""

    def pattern(self) -> Pattern:
        """The pattern. Raises _UnfitError if there is none."""
        self._check_whole()
        ran = (each for each in self.copied.ran if each.target is not operator.getitem)
        reruns = tuple(map(self._rerun, ran))
        for node, made in self.joint.results.items():
            self._describe(node, made)
        for value in self.trace.values:
            _require(self.lies_of[value.id])
        pairs = zip(self.trace.ops, self.joint.nodes, strict=True)
        ops = tuple(self._explained(op, node) for op, node in pairs)
        sites = self.rewritten.sites
        small = [(self._known(made), large) for made, large in sites.small]
        slices = tuple(
            (self._number(each.whole), self._of(each.made), each.left_out, each.alike)
            for each in self.copied.slices
        )
        sized = tuple(op.id for op in ops if any(map(_is_sized, _leaves(op.arguments))))
        lies = tuple(lie if isinstance(lie, tuple) else None for lie in self.numbers)
        return Pattern(
            symbolic=self.symbolic,
            first=replace(self.captured, source=_no_source),
            ops=ops,
            sized=sized,
            lies=lies,
            reruns=reruns,
            lie_of=tuple(lies[0] for lies in self.lies_of),
            same=frozenset((of[0], lie) for of in self.lies_of for lie in of[1:] if lie != of[0]),
            apart=frozenset(self._apart()),
            sides=frozenset(n for lie in lies if lie for n in lie[0] if not isinstance(n, int)),
            wholes=tuple(self.wholes),
            within={op: self._result(op) for op in self.captured.within},
            donations=tuple(self._donations()),
            slices=slices,
            small=tuple(small),
            settings=_settings(),
            large=sites.large,
            were_large=frozenset(sites.large),
            family=Family(sized),
        )

    def _check_whole(self) -> None:
        """Raise _UnfitError if something is captured in one way or another by what is given."""
        captured, copied = self.captured, self.copied
        _require(not any(map(self._is_fixed, copied.module.graph.nodes)))
        _require(self.rewritten.dense is copied.module)
        results = copied.module.graph.output_node().args
        _require(self.rewritten.sparse is None and not any(map(_is_sized, _leaves(results))))
        _require(not any(value.conj or value.neg for value in self.trace.values))
        on_cpu = captured.device.type == "cpu"
        _require(on_cpu or not any("batch_norm" in op.target for op in self.trace.ops))
        inputs = [self.trace.values[value].buffer for value in self.trace.inputs]
        _require(len(set(inputs)) == len(inputs))
        storages = {_storage(node.meta["val"]) for node in self._inputs()}
        _require(len(storages) == len(self.symbolic.given))
        numbers = (n.meta.get("val") for n in self.symbolic.joint.graph.nodes)
        _require(not any(isinstance(n, torch.SymBool) for n in numbers))

    def _is_fixed(self, node: Node) -> bool:
        """Whether a call may be a view of an input from a certain place of its storage."""
        if node.target is not torch.ops.aten.as_strided.default:
            return False
        value = self.joint.results[node.all_input_nodes[0]]
        borrowed: bool = self.trace.buffers[self.trace.values[value].buffer].borrowed
        return borrowed

    def _inputs(self) -> list[Node]:
        """The nodes of the forward inputs."""
        nodes = list(self.joint.module.graph.find_nodes(op="placeholder"))
        return nodes[: len(self.symbolic.given)]

    def _describe(self, node: Node, made: Any) -> None:
        """Take down how the results of a node lie; `made`: their Values."""
        tensors, values = node.meta["val"], made
        if not values and isinstance(values, list):
            return
        if not isinstance(values, list):
            tensors, values = [tensors], [values]
        for tensor, value in zip(tensors, values, strict=True):
            if value is None:
                continue
            number, buffer = self._number(tensor), self.trace.values[value].buffer
            self.lies_of[value].append(number)
            if self.wholes[buffer] < 0:
                self.wholes[buffer] = number

    def _rerun(self, ran: Ran) -> _Rerun:
        args, kwargs = map_aggregate((ran.args, ran.kwargs), self._at)
        made = _tensors(ran.made)
        self.shown.update(map(id, made))
        return _Rerun(ran.target, args, kwargs, tuple(map(self._at, made)))

    def _at(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        _require(not leaf.is_conj() and not leaf.is_neg())
        return _At(self._number(leaf), leaf.dtype, leaf.device)

    def _number(self, tensor: Tensor) -> int:
        """The number of how a fake tensor lies."""
        known = self.copied.described.get(id(tensor))
        if known is not None and known[0] is tensor:
            return self._of(known[1])
        _require(id(tensor) in self.shown)
        return self.numbers.setdefault(id(tensor), len(self.numbers))

    def _of(self, known: Described) -> int:
        """The number of how something is described to lie."""
        nbytes = self.given.get(known.storage, known.nbytes)
        lie = known.shape, known.stride, known.offset, nbytes
        return self.numbers.setdefault(lie, len(self.numbers))

    def _known(self, tensor: Tensor) -> Described:
        """How torch described a fake tensor. Raises _UnfitError if a pass made it."""
        found = self.copied.described.get(id(tensor))
        if found is None or found[0] is not tensor:
            raise _UnfitError
        return found[1]

    def _apart(self) -> Iterator[frozenset[int]]:
        """What `Pattern.apart` consists of."""
        groups: dict[Any, set[int]] = {}
        for v in self.trace.values:
            groups.setdefault((v.buffer, v.dtype, v.conj, v.neg), set()).add(self.lies_of[v.id][0])
        yield from (frozenset(group) for group in groups.values() if len(group) > 1)

    # ---- ops ------------------------------------------------------------------------------------

    def _explained(self, op: Op, node: Node) -> Op:
        """`op`, with each number that hangs on sizes as one that is sized.

        Raises _UnfitError if it is not known which ones do.
        """
        if op.id in self.captured.within:
            value = self.trace.values[self._result(op.id)]
            _require(node.meta[BYTES] == _block_bytes(value))
        if INPUT in node.meta:
            known = self._known(node.meta[INPUT].meta["val"])
            sides, strides = _like(op.args[1], known.shape), _like(op.args[2], known.stride)
            rest = _with_sized(op.args[3:], node.args[3:])
            return replace(op, args=(op.args[0], sides, strides, *rest))
        args = _with_sized(op.args, node.args)
        kwargs = zip(op.kwargs, node.kwargs.values(), strict=True)
        op = replace(op, args=args, kwargs=tuple((k, _with_sized(v, n)) for (k, v), n in kwargs))
        origin = self.copied.origins.get(node)
        if origin is None or origin.target is not node.target:
            _require(node.target in _PASSED_ON)
            return op
        ours = [x for x in _leaves((node.args, dict(node.kwargs))) if not isinstance(x, Node)]
        given = _leaves((origin.args, dict(origin.kwargs)))
        theirs = [x for x in given if not isinstance(x, Node) or x not in self.symbolic.described]
        _require(len(ours) == len(theirs) and all(map(_is_of, ours, theirs)))
        return op

    def _result(self, op: int) -> int:
        """The Value that an op makes that is written block by block."""
        _require(self.trace.ops[op].target == aten.CROSS_ENTROPY)
        (value,) = self.trace.ops[op].outputs
        assert value is not None  # noqa: S101 - the op returns one tensor
        return value

    def _donations(self) -> Iterator[tuple[Donation, bool]]:
        """What `Pattern.donations` consists of."""
        values, done = self.trace.values, {*self.trace.donations}
        for op in self.trace.ops:
            for position in aten.DONATIONS.get(op.target, ((), ""))[0]:
                given, result = op.args[position], op.outputs[0]
                if isinstance(given, Ref) and result is not None:
                    buffer = values[given.value].buffer
                    read = [r for r in refs(op.args) if values[r.value].buffer == buffer]
                    if read == [given]:
                        donation = Donation(op.id, given.value, result)
                        yield donation, donation in done


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(made) if isinstance(leaf, Tensor)]


def _require(fits: object) -> None:
    if not fits:
        raise _UnfitError


def _leaves(given: Any) -> list[Any]:
    return tree_leaves(given, is_leaf=lambda each: each is None)


def _is_sized(leaf: Any) -> bool:
    return isinstance(leaf, SizedInt | SizedFloat)


def _with_sized(arg: Any, given: Any) -> Any:
    """An argument of an op in a trace, with the numbers of the node's argument that are sized."""
    if _is_sized(given):
        return given
    if isinstance(arg, tuple) and isinstance(given, list | tuple):
        return tuple(_with_sized(*pair) for pair in zip(arg, given, strict=True))
    return arg


def _is_of(ours: Any, theirs: Any) -> bool:
    """Whether a number of a copy is that of the symbolic graph, there maybe as a node."""
    if not isinstance(theirs, Node):
        return type(ours) is type(theirs) and bool(ours == theirs)
    if not isinstance(theirs.meta.get("val"), SYMBOLS):
        return not _is_sized(ours)
    return _is_sized(ours) and ours.of is theirs


def _like(numbers: Arg, expressions: Sequence[Any]) -> Arg:
    """`numbers` as the values of `expressions`. Raises _UnfitError if there are more or fewer."""
    assert isinstance(numbers, tuple)  # noqa: S101 - a list of ints, by the op's schema
    _require(len(numbers) == len(expressions))
    return tuple(_sized(n, e) for n, e in zip(numbers, expressions, strict=True))


def _sized(number: Arg, expression: Any) -> Arg:
    if isinstance(expression, int):
        _require(number == expression)
        return number
    made: Arg = sized(number, expression)
    return made


def _no_source() -> Joint:
    raise CaptureError(reason="it was made by a pattern")


# ---- other sizes --------------------------------------------------------------------------------


def _evaluated(lie: Lie, numbers: Numbers, held: Sequence[int]) -> Lie:
    shape, stride, offset, size = lie
    nbytes = held[size.position] if isinstance(size, _OfInput) else numbers.of(size)
    return numbers.all(shape), numbers.all(stride), numbers.of(offset), nbytes


def _shown(rerun: _Rerun, lies: Sequence[Lie], values: Values) -> list[Lie]:
    """How the results of a rerun lie. Views are as on any device, so no fake tensor is needed."""
    mode = None if is_view(rerun.target) else FakeTensorMode()

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, _At):
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
        for t in _tensors(made)
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
    return len({_storage(tensor) for tensor in given}) == len(given) and all(
        layout(tensor) == (*value.shape, *value.stride, value.offset)
        and not tensor.is_conj()
        and not tensor.is_neg()
        for tensor, value in zip(given, values, strict=True)
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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


def _block_bytes(value: Value) -> int:
    dtype = getattr(torch, value.dtype)
    return cross_entropy.block_bytes(torch.empty(value.shape, dtype=dtype, device="meta"))


def _settings() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch._C._get_mkldnn_enabled(),
    )
