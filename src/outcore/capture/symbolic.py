"""symbolic: make joint graphs with numbers from one with symbolic sizes.

torch needs many seconds to trace the step of a large model. If it does so with symbolic sizes, once
is enough: a graph for further sizes is the same graph, with its results described anew.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from outcore.capture.call_memory import attribute
from outcore.capture.compat import mutated_inputs, plain, without_autocast
from outcore.capture.phases import arguments
from outcore.capture.sites import site
from outcore.capture.tracing import as_kernels
from outcore.errors import CaptureError

SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that are symbolic."""

_SLICES = torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default
_OF_SYMBOLS = "eager_input_vals", "tensor_meta"
"""Keys of nodes' metadata that describe more than `val` does, with symbols."""


class UnknownSizesError(Exception):
    """A graph with symbolic sizes cannot be made for the sizes that it is called with."""


def _is_symbolic(described: Tensor) -> bool:
    return any(isinstance(n, SYMBOLS) for n in _lie(described))


def _lie(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, offset and storage size: all numbers that describe where a tensor lies."""
    return *layout(tensor), tensor.untyped_storage().nbytes()


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset, in one tuple."""
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


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
        self._primals, _ = arguments(joint)
        described = [node.meta["val"] for node in self._primals]
        self.given = [i for i, x in enumerate(described) if isinstance(x, Tensor)]
        """Positions of the forward inputs that are tensors: those of the graphs with numbers."""
        self._numbers = [i for i, x in enumerate(described) if not isinstance(x, Tensor)]
        self._sized = [i for i in self.given if _is_symbolic(described[i])]
        self.inputs = len(described)
        """How many forward inputs there are."""
        self.overwritten = frozenset(mutated_inputs(joint.graph.output_node(), self._primals))
        """As `Captured.overwritten`."""
        static = set(static_inputs)
        self.static_inputs = [new for new, old in enumerate(self.given) if old in static]
        """As for `capture`, of the graphs with numbers."""

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers and sizes that a graph for the forward inputs `args` depends on."""
        numbers = tuple(args[i] for i in self._numbers)
        return numbers, tuple(layout(args[i]) for i in self._sized)

    def at(self, args: Sequence[Any]) -> GraphModule:
        """The graph for forward inputs like `args`, without those that are numbers.

        Raises CaptureError if its results cannot be described.
        """
        mode = FakeTensorMode()
        with as_kernels(), enable_python_dispatcher(), without_autocast(), torch.no_grad():
            try:
                return self._made(mode, args)
            except (CaptureError, MemoryError):
                raise
            except Exception as error:  # ops may raise anything under fake tensors
                what, *_ = str(error).splitlines() or [""]
                reason = f"it cannot be described for other sizes ({type(error).__name__}: {what})"
                raise CaptureError(reason=reason) from error

    def _made(self, mode: FakeTensorMode, args: Sequence[Any]) -> GraphModule:
        symbols = self._symbols(args)
        inputs = dict(zip(self._primals, args, strict=True))
        graph = Graph()
        new: dict[Node, Any] = {}
        """Node -> its copy, or the number that replaces it."""
        for node in self.joint.graph.nodes:
            if node.op == "output":
                _finish(graph, node, new, self.forward_outputs, self.given)
            elif node.op == "placeholder" and not isinstance(node.meta["val"], Tensor):
                new[node] = inputs[node]
            elif node.op == "placeholder":
                described = node.meta["val"]
                made = _input(mode, inputs.get(node), described, symbols)
                new[node] = _copied(graph, node, (), {}, made)
            elif node.op == "get_attr":
                held = mode.from_tensor(attribute(self.joint, node), static_shapes=True)
                new[node] = _copied(graph, node, (), {}, held)
            else:
                args_, kwargs = map_aggregate((node.args, node.kwargs), _by(new))
                values = map_aggregate((args_, kwargs), _value)
                with mode:
                    made = node.target(*values[0], **values[1])
                new[node] = made
                if _takes_all(node, values[0], made):
                    new[node] = args_[0]
                elif not _is_number(node):
                    new[node] = _copied(graph, node, args_, kwargs, made)
        return GraphModule(self.joint, graph)

    def _symbols(self, args: Sequence[Any]) -> Mapping[Any, int]:
        """Torch's symbols -> their values, by the forward inputs `args`."""
        found: dict[Any, int] = {}
        for i in (*self._numbers, *self._sized):
            described = self._primals[i].meta["val"]
            pairs = (
                zip(_lie(described), _lie(args[i]), strict=True)
                if isinstance(described, Tensor)
                else [(described, args[i])]
            )
            for symbolic, number in pairs:
                if isinstance(symbolic, SYMBOLS) and symbolic.node.expr.is_Symbol:
                    found.setdefault(symbolic.node.expr, number)
        return found


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


def _takes_all(node: Node, args: Sequence[Any], made: Any) -> bool:
    """Whether a call takes a slice of all, or undoes that. torch traces it only with symbols."""
    return node.target in _SLICES and args[0].shape == made.shape


def _input(mode: FakeTensorMode, given: Any, described: Tensor, symbols: Mapping[Any, int]) -> Any:
    """A fake tensor for what is `given`; for a tangent, which is not given yet, as described."""
    if given is not None:
        return mode.from_tensor(plain(given).detach(), static_shapes=True)
    size = _number(described.untyped_storage().nbytes(), symbols)
    numbers = [_number(n, symbols) for n in layout(described)]
    sides = described.dim()
    with mode:
        whole = torch.empty(
            size // described.itemsize, dtype=described.dtype, device=described.device
        )
        made = whole.as_strided(numbers[:sides], numbers[sides:-1], numbers[-1])
        made = torch._conj(made) if described.is_conj() else made
        return torch._neg_view(made) if described.is_neg() else made


def _number(size: Any, symbols: Mapping[Any, int]) -> int:
    """The value of a size. Raises TypeError if it is not determined by the forward inputs."""
    return int(size.node.expr.xreplace(symbols)) if isinstance(size, SYMBOLS) else size


def _by(new: Mapping[Node, Any]) -> Any:
    return lambda arg: new[arg] if isinstance(arg, Node) else arg


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _copied(graph: Graph, node: Node, args: Any, kwargs: Any, made: Any) -> Node:
    copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
    copy.meta = {k: v for k, v in node.meta.items() if k not in _OF_SYMBOLS} | {"val": made}
    return copy


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
