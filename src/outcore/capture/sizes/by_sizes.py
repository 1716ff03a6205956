"""by_sizes: compile a graph with symbolic sizes so that each combination has a graph of its own.

torch makes a size symbolic when it meets a second value for it. A plan counts bytes, so it needs
numbers. The graph is compiled once, and graphs with numbers are made from that (`symbolic.py`). If
that is not possible, it is compiled anew for sizes that it has not had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outcore.capture.compiler.compat import RestartAnalysis, as_dynamo_compiles, carry_sources
from outcore.capture.sizes.described import SYMBOLS, layout
from outcore.capture.sizes.symbolic import UnknownSizesError
from outcore.errors import CaptureError, OutcoreError

MOST_SIZES: Final = 64
"""The most combinations of sizes that one graph is compiled for."""

Call = Callable[..., Any]


def is_symbolic(module: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether `module` with these inputs has symbolic sizes and needs gradients."""
    described = _described(module, example_inputs)
    if not any(isinstance(x, SYMBOLS) or _has_symbols(x) for x in described):
        return False
    if any(map(is_traceable_wrapper_subclass, example_inputs)):  # plans do not support these
        return False
    given = (x for x in example_inputs if isinstance(x, torch.Tensor))
    trained = any(x.requires_grad for x in chain(given, module.parameters()))
    return trained and torch.is_grad_enabled()


class BySizes:
    """Calls a module with symbolic sizes, each call by a graph for the sizes at hand.

    `module` has the symbolic `example_inputs`. `compiled` makes a graph from a module and its
    inputs; `symbolic` makes one for all sizes, or raises CaptureError. If there are too many
    combinations of sizes, or a graph cannot be made, `refused` gets the reason and returns what is
    called instead.
    """

    def __init__(
        self,
        module: GraphModule,
        example_inputs: Sequence[Any],
        compiled: Callable[[GraphModule, Sequence[Any]], Call],
        symbolic: Callable[[GraphModule, Sequence[Any]], Call],
        refused: Callable[[CaptureError], Call],
    ) -> None:
        self.module, self._compiled, self._refused = module, compiled, refused
        placeholders = module.graph.find_nodes(op="placeholder")
        self._numbers = [
            i
            for i, (node, x) in enumerate(zip(placeholders, example_inputs, strict=True))
            if isinstance(x, SYMBOLS) or _holds_number(node, x)
        ]
        described = _described(module, example_inputs)
        self._sized = [i for i, x in enumerate(described) if _has_symbols(x)]
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._otherwise: Call | None = None
        """What is called for further combinations once there are `MOST_SIZES`."""
        self._once: Call | None = None
        """What is called for all sizes, unless inputs overlap: torch does not check that."""
        if not _overlapping(example_inputs):
            with suppress(CaptureError), _as_capture_errors():
                self._once = symbolic(module, example_inputs)

    def __call__(self, *args: Any) -> Any:
        """Return what `module` returns for `args`."""
        if self._once is not None and not _overlapping(args):
            with suppress(UnknownSizesError):
                return self._once(*args)
        call = self._calls.get(self._key(args))
        if call is None:
            with as_dynamo_compiles():
                call = self._new_call(args)
        return call(*args)

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What a graph depends on and torch does not check: sizes, and which inputs overlap."""
        numbers = tuple(_told_apart(_number(args[i])) for i in self._numbers)
        return numbers, tuple(layout(args[i]) for i in self._sized), _overlapping(args)

    def _new_call(self, args: Sequence[Any]) -> Call:
        key = self._key(args)
        call = self._calls.get(key)  # another thread may have compiled it meanwhile
        if call is None:
            if len(self._calls) >= MOST_SIZES:
                return self._past_the_most()
            try:
                call = self._of_these_sizes(args)
            except CaptureError as error:
                call = self._refused(error)
            self._calls[key] = call
        return call

    def _past_the_most(self) -> Call:
        if self._otherwise is None:
            reason = (
                f"it was called with more than {MOST_SIZES} combinations of sizes; pad inputs to a "
                "few sizes"
            )
            self._otherwise = self._refused(CaptureError(reason=reason))
        return self._otherwise

    def _of_these_sizes(self, args: Sequence[Any]) -> Call:
        """Compile the module for the sizes of `args`; raise CaptureError if torch cannot."""
        numbers = {i: _number(args[i]) for i in self._numbers}
        module = _with_numbers(self.module, numbers)
        others = [x for i, x in enumerate(args) if i not in numbers]
        with _as_capture_errors():
            call = self._compiled(module, others)

        def without_numbers(*args: Any) -> Any:
            return call(*(x for i, x in enumerate(args) if i not in numbers))

        return without_numbers


@contextmanager
def _as_capture_errors() -> Iterator[None]:
    """Turn what torch raises, for example for a size that is read from data, into CaptureError."""
    try:
        yield
    except (OutcoreError, RestartAnalysis, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what, *_ = str(error).splitlines() or [""]
        reason = f"its sizes are not known before it runs ({type(error).__name__}: {what})"
        raise CaptureError(reason=reason) from error


def _with_numbers(module: GraphModule, numbers: Mapping[int, float]) -> GraphModule:
    """Return a copy of `module` with the inputs at these positions replaced by numbers."""
    placeholders = module.graph.find_nodes(op="placeholder")
    copies: dict[Node, Any] = {}
    for i, number in numbers.items():
        node = placeholders[i]
        copies |= dict.fromkeys((node, *(user for user in node.users if _reads(user))), number)
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, copies))
    found = GraphModule(module, graph)
    carry_sources(module, found, copies)
    return found


def _holds_number(node: Node, given: Any) -> bool:
    """Whether it is a tensor that dynamo made from a float: the graph only reads its number."""
    if not isinstance(given, torch.Tensor) or given.dim() or given.device.type != "cpu":
        return False
    return given.dtype is torch.float64 and all(map(_reads, node.users))


def _reads(node: Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _number(given: Any) -> Any:
    return given.item() if isinstance(given, torch.Tensor) else given


def _told_apart(number: Any) -> Any:
    """A number as part of a key: `==` is wrong for zeros of either sign and for NaN."""
    return number.hex() if isinstance(number, float) else number


def _described(module: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs with their symbolic sizes: Dynamo's fake tensors, or else the inputs themselves.

    Dynamo passes real tensors. A size that it passes to no op, such as that of the larger tensor
    which an input is a part of, is symbolic only in its fake tensors.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, example_inputs, strict=True)
    return [node.meta.get("example_value", given) for node, given in pairs]


def _has_symbols(given: Any) -> bool:
    """Whether a size is symbolic: that of a tensor, or of a larger one that it is a part of."""
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
        return False
    numbers = *layout(given), given.untyped_storage().nbytes()
    return any(isinstance(number, torch.SymInt) for number in numbers)


def _overlapping(args: Sequence[Any]) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Position and layout of the tensors that share memory, one group per shared storage."""
    places: dict[int, list[int]] = {}
    for i, given in enumerate(args):
        if type(given) in (torch.Tensor, torch.nn.Parameter) and given.layout is torch.strided:
            places.setdefault(given.untyped_storage().data_ptr(), []).append(i)
    shared = (group for group in places.values() if len(group) > 1)
    return tuple(tuple((i, *layout(args[i])) for i in group) for group in shared)
