"""symbolic: make joint graphs with numbers from one with symbolic sizes.

torch needs many seconds to trace the step of a large model. If it does so with symbolic sizes, once
is enough: a graph for further sizes is the same graph, with numbers in place of symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from outcore import aten
from outcore.capture.compiler.compat import LazyGraphModule, mutated_inputs, plain, without_autocast
from outcore.capture.compiler.layouts import VIEWS
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.nodes.call_memory import attribute
from outcore.capture.nodes.phases import arguments
from outcore.capture.nodes.sites import site
from outcore.capture.sizes.described import (
    SYMBOLS,
    Described,
    Fakes,
    Numbers,
    described,
    layout,
    lie,
    sized,
    storages,
    unsized,
)
from outcore.errors import CaptureError

_SLICES: Final = torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default
_BY_NUMBERS: Final = (torch.ops.aten.constant_pad_nd.default,)
"""Ops whose results lie otherwise for some numbers: without padding, as the argument."""
_OF_SYMBOLS: Final = "eager_input_vals", "tensor_meta"
"""Keys of nodes' metadata that describe more than `val` does, with symbols."""


class UnknownSizesError(Exception):
    """A graph with symbolic sizes cannot be made for the sizes that it is called with."""


class Values:
    """The numbers of a symbolic graph, for the forward inputs `args`.

    Floats are computed by the graph's own calls: an expression would round otherwise.
    """

    def __init__(self, symbolic: Symbolic, args: Sequence[Any]) -> None:
        self.sizes = symbolic.numbers(args)
        self._described = symbolic.described
        self._known = dict(zip(symbolic.primals, args, strict=True))
        self._rest = iter(symbolic.computed)

    def of(self, node: Node) -> Any:
        """The value of a node that is a number. Those before it are computed first."""
        while node not in self._known:
            following = next(self._rest)
            self._known[following] = self._computed(following)
        return self._known[node]

    def _computed(self, node: Node) -> Any:
        known = node.meta["val"]
        if not isinstance(known, SYMBOLS):
            return known
        if any(n in self._described for n in node.all_input_nodes):
            return self.sizes.of(known.node.expr)  # a size of a tensor
        args, kwargs = map_aggregate((node.args, node.kwargs), _by(self._known))
        return node.target(*args, **kwargs)  # type: ignore[operator]  # it is a call


class Symbolic:
    """A joint graph with symbolic sizes.

    `forward_outputs` and `static_inputs` are as for `capture`. Raises CaptureError if the graph
    contains what cannot be made for other sizes without torch: inner graphs, ops whose results
    depend on data.
    """

    def __init__(
        self, joint: GraphModule, forward_outputs: int, static_inputs: Sequence[int]
    ) -> None:
        self.joint, self.forward_outputs = joint, forward_outputs
        for node in joint.graph.nodes:
            _check(joint, node)
        self.primals, _ = arguments(joint)
        """Nodes of the forward inputs."""
        inputs = [node.meta["val"] for node in self.primals]
        self.given = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        """Positions of the forward inputs that are tensors: those of the graphs with numbers."""
        self._numbers = [i for i, x in enumerate(inputs) if not isinstance(x, Tensor)]
        self._sized = [i for i in self.given if _is_symbolic(inputs[i])]
        self.inputs = len(inputs)
        """How many forward inputs there are."""
        self.overwritten = frozenset(mutated_inputs(joint.graph.output_node(), self.primals))
        """As `Captured.overwritten`."""
        static = set(static_inputs)
        self.static_inputs = [new for new, old in enumerate(self.given) if old in static]
        """As for `capture`, of the graphs with numbers."""
        self.described = {
            node: described(node.meta["val"])
            for node in joint.graph.nodes
            if node.op != "output" and not _is_number(node)
        }
        """Node -> what it makes, as torch described it. Numbers are left out."""
        calls = (node for node in joint.graph.nodes if node.op == "call_function")
        self.computed = [n for n in calls if _is_number(n) and n.meta.get("val") is not None]
        """The calls that return numbers, in order."""

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers and sizes that a graph for the forward inputs `args` depends on."""
        numbers = tuple(args[i] for i in self._numbers)
        return numbers, tuple(layout(args[i]) for i in self._sized)

    def at(self, args: Sequence[Any]) -> Copied:
        """The graph for forward inputs like `args`, without those that are numbers.

        A tensor among `args` may be a Described. Raises CaptureError if the graph's results cannot
        be described.
        """
        with as_kernels(), enable_python_dispatcher(), without_autocast(), torch.no_grad():
            try:
                return _Copy(self, args).made()
            except (CaptureError, MemoryError):
                raise
            except Exception as error:  # expressions and ops may raise anything
                what, *_ = str(error).splitlines() or [""]
                reason = f"it cannot be described for other sizes ({type(error).__name__}: {what})"
                raise CaptureError(reason=reason) from error

    def numbers(self, args: Sequence[Any]) -> Numbers:
        """The values of sizes, by the forward inputs `args`."""
        return Numbers(self._symbols(args))

    def _symbols(self, args: Sequence[Any]) -> Mapping[Any, int]:
        """Torch's symbols -> their values, by the forward inputs `args`."""
        known: list[tuple[Any, int]] = []
        for i in (*self._numbers, *self._sized):
            given = self.primals[i].meta["val"]
            pairs = (
                zip(lie(given), lie(args[i]), strict=True)
                if isinstance(given, Tensor)
                else [(given, args[i])]
            )
            known += [(x.node.expr, n) for x, n in pairs if isinstance(x, SYMBOLS)]
        found = {x: n for x, n in reversed(known) if x.is_Symbol}
        for expression, number in known:  # such as the bytes of a larger tensor that one is part of
            times, symbol = expression.as_coeff_Mul()
            if symbol.is_Symbol and symbol not in found and number % times == 0:
                found[symbol] = number // int(times)
        return found


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a symbolic graph with numbers, and how its parts follow from symbols."""

    module: GraphModule
    """The copy. Numbers among its arguments that come from symbols are SizedInt or SizedFloat."""
    described: Mapping[int, tuple[Tensor, Described]]
    """As `Fakes.described`."""
    origins: Mapping[Node, Node]
    """Node -> the symbolic graph's node that it is a copy of."""
    ran: tuple[Ran, ...]
    """The calls that were run because torch's word does not hold, in order."""
    slices: tuple[Sliced, ...]
    """All slices, those that are left out, too."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that was run on fake tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Any
    """What it returned: fake tensors."""
    alike: bool
    """Whether they lie as torch described."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """A slice, or the call that undoes one, as torch described it."""

    whole: Tensor
    """The fake tensor that it is of."""
    made: Described
    """What it makes."""
    left_out: bool
    """Whether it takes all of it."""
    alike: bool
    """Whether it then also lies as its argument."""


class _Copy:
    """Copies a graph, with numbers in place of symbols: those of the forward inputs `args`."""

    def __init__(self, symbolic: Symbolic, args: Sequence[Any]) -> None:
        self.symbolic, self.joint = symbolic, symbolic.joint
        self.args = dict(zip(symbolic.primals, args, strict=True))
        self.fakes = Fakes(symbolic.numbers(args))
        self.graph = Graph()
        self.new: dict[Node, Any] = {}
        """Node -> its copy, or the number that replaces it."""
        self.otherwise: set[Node] = set()
        """Nodes whose results do not lie as torch described."""
        self.origins: dict[Node, Node] = {}
        """As `Copied.origins`."""
        self.ran: list[Ran] = []
        """As `Copied.ran`."""
        self.slices: list[Sliced] = []
        """As `Copied.slices`."""

    def made(self) -> Copied:
        """The copy. To be called once."""
        for node in self.joint.graph.nodes:
            if node.op == "output":
                outputs, given = self.symbolic.forward_outputs, self.symbolic.given
                _finish(self.graph, node, self.new, outputs, given)
            elif node.op == "call_function":
                self.new[node] = self._call(node)
            else:
                self.new[node] = self._held(node)
        return Copied(
            LazyGraphModule(self.joint, self.graph),  # nobody may ever run it as it is
            self.fakes.described,
            self.origins,
            tuple(self.ran),
            tuple(self.slices),
        )

    def _held(self, node: Node) -> Any:
        """The copy of an input or a constant; the number that is given for a symbol."""
        constant = node.op == "get_attr"
        given = attribute(self.joint, node) if constant else self.args.get(node)
        if node not in self.symbolic.described:
            return self._sized(node, given)
        known = self.symbolic.described[node]
        made = self.fakes.made(known) if given is None else self.fakes.like(plain(given), known)
        if layout(made) != self.fakes.numbers.all(lie(known)[:-1]):  # torch ignores where it begins
            self.otherwise.add(node)
        return self._copied(node, (), {}, made)

    def _call(self, node: Node) -> Any:
        """The copy of a call; its result if that is a number."""
        args: Any
        kwargs: Any
        args, kwargs = map_aggregate((node.args, node.kwargs), _by(self.new))
        if _is_number(node):  # which may return an argument itself, as a maximum does
            plain_args, plain_kwargs = map_aggregate((args, kwargs), unsized)
            return self._sized(node, self._run(node, plain_args, plain_kwargs))
        known = self.symbolic.described[node]
        if node.target in _SLICES:
            whole = args[0].meta["val"]
            left_out = self._takes_all(whole, known)
            alike = left_out and self._take(node, whole)
            self.slices.append(Sliced(whole, known, left_out, alike))
            if left_out:
                return args[0]
        if self._holds(node, known):
            made = self.fakes.made(known)
        else:
            made = self._run(node, args, kwargs)
            given, named = map_aggregate((args, kwargs), _value)
            self.ran.append(Ran(node.target, given, named, made, self._take(node, made)))
        return self._copied(node, args, kwargs, made)

    def _sized(self, node: Node, number: Any) -> Any:
        """The value of a node that is a number; it remembers the node if that is symbolic."""
        return sized(number, node) if isinstance(node.meta.get("val"), SYMBOLS) else number

    def _holds(self, node: Node, known: Any) -> bool:
        """Whether to trust what torch says of a call: then the op need not run.

        Not if an argument lies otherwise, or where the layout hangs on numbers in another way than
        on symbols. Nor if passes have replaced an argument: then a view does not share its memory,
        by what is said of the two.
        """
        if not isinstance(node.target, OpOverload) or node.target in _BY_NUMBERS:
            return False
        if node.target in VIEWS and 1 in self.fakes.shape(known):
            return False
        if not self.otherwise.isdisjoint(node.all_input_nodes):
            return False
        made = storages(known)
        if aten.may_alias(node.target):
            given = (storages(self.symbolic.described.get(n)) for n in node.all_input_nodes)
            return made <= set(chain.from_iterable(given))
        return made.isdisjoint(self.fakes.storages)

    def _takes_all(self, whole: Tensor, known: Described) -> bool:
        """Whether a call slices all, or undoes that. torch traces it only with symbols."""
        return tuple(whole.shape) == self.fakes.shape(known)

    def _take(self, node: Node, made: Any) -> bool:
        alike = self.fakes.take(made, self.symbolic.described[node])
        if not alike:
            self.otherwise.add(node)
        return alike

    def _run(self, node: Node, args: Any, kwargs: Any) -> Any:
        """What a call makes of fake tensors."""
        args, kwargs = map_aggregate((args, kwargs), _value)
        with self.fakes.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]  # it is a call

    def _copied(self, node: Node, args: Any, kwargs: Any, made: Any) -> Node:
        copy = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {k: v for k, v in node.meta.items() if k not in _OF_SYMBOLS} | {"val": made}
        self.origins[copy] = node
        return copy


def _check(joint: GraphModule, node: Node) -> None:
    """Raise CaptureError for a node that is not the same for other sizes, or may not be."""
    made, is_op = node.meta.get("val"), isinstance(node.target, OpOverload)
    if node.op == "placeholder":
        fine = isinstance(made, Tensor | torch.SymInt)
    elif node.op == "get_attr":
        fine = isinstance(attribute(joint, node), Tensor)
    elif node.op == "call_function" and is_op:
        fine = not node.meta.get("unbacked_bindings")  # torch lists the symbols read from data here
    elif node.op == "call_function":
        fine = node.target is operator.getitem or _is_number(node)
    else:
        fine = node.op == "output"
    if not fine:
        reason = f"{node.op} {node.target} depends on more than sizes"
        raise CaptureError(reason=reason, site=site(node))


def _is_number(node: Node) -> bool:
    """Whether a call returns a number, or only checks numbers."""
    made = node.meta.get("val")
    if made is None and isinstance(node.target, OpOverload) and node.target.namespace == "aten":
        return not any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    return isinstance(made, (*SYMBOLS, bool, int, float))


def _by(new: Mapping[Node, Any]) -> Any:
    return lambda arg: new[arg] if isinstance(arg, Node) else arg


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _is_symbolic(known: Tensor) -> bool:
    return any(isinstance(n, SYMBOLS) for n in lie(known))


def _finish(
    graph: Graph, output: Node, new: Mapping[Node, Any], forward_outputs: int, given: list[int]
) -> None:
    """Return the forward results, and the gradients of the inputs that are tensors."""
    kept = [*range(forward_outputs), *(forward_outputs + i for i in given)]

    def some(of: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(of[i] for i in kept if i < len(of))

    results: Any = output.args[0]
    made = graph.output(map_aggregate(some(results), _by(new)))
    made.meta = {**output.meta, "desc": some(output.meta.get("desc", ()))}
