"""draw: a pattern from the copy of a symbolic graph for some sizes, and what was captured of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves

from outcore import aten
from outcore.capture.captured import Captured, Joint
from outcore.capture.nodes.call_memory import BYTES
from outcore.capture.nodes.storages import storage_id, tensors_in
from outcore.capture.patterns.pattern import (
    MAY_RAISE,
    At,
    Lie,
    OfInput,
    Pattern,
    Rerun,
    block_bytes,
    settings,
)
from outcore.capture.rewrites import convolution, cross_entropy, writes
from outcore.capture.rewrites.metadata_only import INPUT
from outcore.capture.sizes.described import SYMBOLS, Described, SizedFloat, SizedInt, sized
from outcore.capture.sizes.symbolic import Copied, Ran, Symbolic
from outcore.capture.source import Rewritten, Source
from outcore.errors import CaptureError
from outcore.ir.family import Family
from outcore.ir.trace import Arg, Donation, Op, Ref, refs

_PASSED_ON: Final = frozenset(
    {convolution.BACKWARD, cross_entropy.GRADIENT, *writes.WRITES.values()}
)
"""Calls that passes make: their numbers are those of the calls that they replace."""


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
    except (_UnfitError, *MAY_RAISE):  # it has something that nobody thought of
        return None


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
        self.given = {symbolic.described[n].storage: OfInput(i) for i, n in enumerate(given)}
        """Storages of the forward inputs, as in a Described."""
        self.shown: set[int] = set()
        """Ids of the fake tensors that reruns make."""

    def pattern(self) -> Pattern:
        """The pattern. Raises _UnfitError if there is none."""
        self._check_whole()
        ran = (*self.copied.ran, *self._described_anew())
        reruns = tuple(self._rerun(each) for each in ran if each.target is not operator.getitem)
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
            settings=settings(),
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
        storages = {storage_id(node.meta["val"]) for node in self._inputs()}
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

    def _described_anew(self) -> Iterator[Ran]:
        """The calls that passes described anew, as if they were run for the copy."""
        for node in self.joint.module.graph.nodes:
            if writes.ANEW in node.meta:
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                yield Ran(node.target, args, kwargs, node.meta["val"], alike=False)

    def _rerun(self, ran: Ran) -> Rerun:
        args, kwargs = map_aggregate((ran.args, ran.kwargs), self._at)
        made = tensors_in(ran.made)
        self.shown.update(map(id, made))
        return Rerun(ran.target, args, kwargs, tuple(map(self._at, made)))

    def _at(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        _require(not leaf.is_conj() and not leaf.is_neg())
        return At(self._number(leaf), leaf.dtype, leaf.device)

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
            _require(node.meta[BYTES] == block_bytes(value))
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
