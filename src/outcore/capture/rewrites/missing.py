"""missing: leave out of a joint graph what the gradients that no backward is given would add.

Autograd gives backward zeros for results of forward that get no gradient, such as the logits that a
model returns with its loss. AOTAutograd's joint graph computes with these zeros: it adds them to
other gradients, or multiplies weights by them. Plain PyTorch does neither.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from outcore import aten
from outcore.capture.compiler.compat import (
    LazyGraphModule,
    mutated_inputs,
    runs_in_backward,
    statically_known_true,
    tag_as_backward,
)
from outcore.capture.nodes.phases import arguments, phases
from outcore.capture.nodes.storages import tensors_in
from outcore.capture.rewrites.views import describe_again
from outcore.capture.rewrites.zeros import args_in, zeros_of
from outcore.ir.trace import Effect

_aten = torch.ops.aten

ADD = _aten.add.Tensor
"""How AOTAutograd sums the gradients that a tensor gets from several users."""


class Missing:
    """What of a joint graph is zeros if gradients of forward results are missing.

    `joint` is not changed, and must not be afterward.
    """

    def __init__(self, joint: GraphModule, forward_outputs: int) -> None:
        self.joint, self.forward_outputs = joint, forward_outputs
        self._primals, self.tangents = arguments(joint)

    @cached_property
    def overwritten(self) -> tuple[int, ...]:
        """As `Captured.overwritten`. Raises CaptureError if they cannot be told."""
        return mutated_inputs(self.joint.graph.output_node(), self._primals)

    @cached_property
    def gradients(self) -> list[int]:
        """For each gradient a set of tangents: it is zeros if all of these are missing.

        Bit i stands for tangent i; 0: the gradient may always be more than zeros, or is None.
        """
        return [self._zero.get(each, 0) for each in self._results[self.forward_outputs :]]

    @cached_property
    def again(self) -> bool:
        """Whether forward may run once more, and gradients are the same then.

        AOTAutograd overwrites inputs, such as running statistics, when a forward call is over.
        """
        if any(t.layout is not torch.strided for n in self.joint.graph.nodes for t in _made(n)):
            return False
        forward, _ = phases(self.joint, self.forward_outputs)
        if not all(_repeats(node, self.device) for node in forward):
            return False
        described = self.joint.graph.output_node().meta.get("desc", ())
        pairs = zip_longest(self._results, described)
        read = (each for each, desc in pairs if getattr(desc, "mutated_input", None) is None)
        return not _reads(read, {self._primals[i] for i in self.overwritten})

    @property
    def device(self) -> torch.device:
        """The device of the tangents; the CPU's numbers go with any."""
        devices: list[torch.device] = [node.meta["val"].device for node in self.tangents]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def losses(self, static: Collection[int]) -> int:
        """The tangents of results that are single numbers and depend on data, as a set of bits.

        `static`: positions of the inputs that persist from step to step.
        """
        data = {node for i, node in enumerate(self._primals) if i not in static}
        for node in self.joint.graph.nodes:
            if not data.isdisjoint(node.all_input_nodes):
                data.add(node)
        described = list(self.joint.graph.output_node().meta.get("desc", ()))
        results = dict(zip(described[: self.forward_outputs], self._results, strict=False))
        whose = (getattr(tangent.meta.get("desc"), "output", None) for tangent in self.tangents)
        found = (results.get(each) in data for each in whose)
        scalar = (not tangent.meta["val"].ndim for tangent in self.tangents)
        return sum(1 << i for i, each in enumerate(zip(found, scalar, strict=True)) if all(each))

    def without(self, left: int) -> int:
        """Those of the tangents of the set `left` that the graph can do without."""
        left &= sum(self._zero[tangent] for tangent in self.tangents)  # 0 if nothing is known
        while True:
            needed = 0
            for node in _needed(self.joint.graph, self._zeros(left)):
                needed |= self._zero[node]
            if not needed & left:
                return left
            left &= ~needed

    def reduced(self, left: int) -> GraphModule:
        """A copy of the graph without the tangents of the set `left`, which `without` returned.

        None is in place of gradients that are zeros.
        """
        graph = Graph()
        new: dict[Node, Node] = {}
        results: Any = graph.graph_copy(self.joint.graph, new)
        zeros = {new[node] for node in self._zeros(left)}
        output = graph.output(
            [None if i >= self.forward_outputs and r in zeros else r for i, r in enumerate(results)]
        )
        output.meta = dict(self.joint.graph.output_node().meta)
        for node in list(graph.nodes):
            if node not in zeros and _adds(node, zeros):
                _keep_other(graph, node, zeros)
        kept = {tangent for i, tangent in enumerate(self.tangents) if not left >> i & 1}
        _erase(graph, list(map(new.__getitem__, self._zero)), {new[node] for node in kept})
        graph.lint()
        return LazyGraphModule(self.joint, graph)

    def late(self, left: int) -> GraphModule | None:
        """As `reduced`, but forward makes nothing: all is computed in the backward call.

        None if backward draws random numbers: they would be other ones.
        """
        _, backward = phases(self.joint, self.forward_outputs)
        ops = (node.target for node in backward if isinstance(node.target, OpOverload))
        if any(Effect.RANDOM in aten.effects(op) for op in ops):
            return None
        module = self.reduced(left)
        graph, output = module.graph, module.graph.output_node()
        results: Any = output.args[0]
        made = [each for each in results[: self.forward_outputs] if isinstance(each, Node)]
        gradients = results[self.forward_outputs :]
        output.args = ([None] * self.forward_outputs + list(gradients),)
        _erase(graph, made, set())
        for node in graph.nodes:
            if node.op == "call_function":
                tag_as_backward(node)
        module.recompile()
        return module

    @cached_property
    def _zero(self) -> dict[Node, int]:
        return zeros_of(self.joint, self.tangents)

    @property
    def _results(self) -> Any:
        return self.joint.graph.output_node().args[0]

    def _zeros(self, left: int) -> set[Node]:
        """The nodes that are zeros if the tangents of the set `left` are missing."""
        return {node for node, of in self._zero.items() if of and of & ~left == 0}


def _made(node: Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _repeats(node: Node, device: torch.device) -> bool:
    """Whether a call may run a second time, and returns the same, but for rounding.

    Random ops do if they draw from the generator of `device`.
    """
    made = _made(node)
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem or ("val" in node.meta and not made)
    effects = aten.effects(node.target)
    draws_there = bool(made) and all(t.device == device for t in made)
    return effects <= {Effect.RANDOM} and (draws_there or not effects)


def _needed(graph: Graph, zeros: set[Node]) -> set[Node]:
    """Those of `zeros` that the results need otherwise than to add them, or as gradients."""
    found = set[Node]()
    stack = [node for node in graph.nodes if not node.users and not _may_go(node)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        given = [_other(node, zeros)] if _adds(node, zeros) else node.all_input_nodes
        if node.op != "output":
            found |= zeros.intersection(given)
        new = set(given) - seen - zeros
        seen |= new
        stack += new
    return found


def _reads(results: Iterable[Any], stale: set[Node]) -> bool:
    """Whether results depend on inputs of the set `stale`, other than by new statistics."""
    stack = [each for each in results if isinstance(each, Node)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        safe, _ = aten.statistics(str(node.target), node.args)
        source: Any = node.args[0] if node.target is operator.getitem else None
        if (
            source is not None
            and node.args[1] in aten.statistics(str(source.target), source.args)[1]
        ):
            return True
        new = set(node.all_input_nodes) - {node.args[i] for i in safe} - seen
        if new & stale:
            return True
        seen |= new
        stack += new
    return False


def _adds(node: Node, zeros: Collection[Node]) -> bool:
    """Whether a call adds zeros to one other tensor, and that lies as the sum, or can be copied."""
    if node.target is not ADD or len(args_in(node, zeros)) != 1:
        return False
    other = _other(node, zeros)
    if not isinstance(other, Node):
        return False
    made, given = node.meta["val"], other.meta["val"]
    same = made.dtype == given.dtype and _all_equal(made.shape, given.shape)
    return same and (_all_equal(made.stride(), given.stride()) or _order_of(made) is not None)


def _other(add: Node, zeros: Collection[Node]) -> Any:
    """What a call adds to zeros, or adds zeros to; None if it multiplies that by a number."""
    first, second = add.args
    if first not in zeros:
        return first
    return None if add.kwargs.get("alpha", 1) != 1 else second


def _keep_other(graph: Graph, add: Node, zeros: Collection[Node]) -> None:
    """Let the users of a sum with zeros use the other tensor."""
    other, made = _other(add, zeros), add.meta["val"]
    if not _all_equal(made.stride(), other.meta["val"].stride()):
        with graph.inserting_before(add):
            other = _laid_out_as(graph, other, add)
    add.replace_all_uses_with(other)


def _laid_out_as(graph: Graph, node: Node, like: Node) -> Node:
    """A node of backward that copies `node`, and lies in memory as `like`."""
    order = _order_of(like.meta["val"]) or []
    dense = {"memory_format": torch.contiguous_format}
    turned = _called(graph, like, _aten.permute.default, (node, order))
    copied = _called(graph, like, _aten.clone.default, (turned,), dense)
    back = [order.index(i) for i in range(len(order))]
    return _called(graph, like, _aten.permute.default, (copied, back))


def _called(graph: Graph, like: Node, op: Any, args: Any, kwargs: Any = None) -> Node:
    made = graph.call_function(op, args, kwargs)
    made.meta = dict(like.meta)
    describe_again(made)
    return made


def _all_equal(some: Any, others: Any) -> bool:
    """Whether sizes are equal, pair by pair. Of symbolic ones, whether they must be."""
    return len(some) == len(others) and all(
        statically_known_true(a == b) for a, b in zip(some, others, strict=True)
    )


def _order_of(made: Tensor) -> list[int] | None:
    """The dimensions from outermost to innermost, if items lie without gaps; else None.

    Of symbolic sizes, whether they must.
    """
    order: list[int] = []
    expected: Any = 1
    while len(order) < made.ndim:
        left = (i for i in reversed(range(made.ndim)) if i not in order)
        found = [i for i in left if statically_known_true(made.stride(i) == expected)]
        if not found:
            return None
        ones = (i for i in found if statically_known_true(made.shape[i] == 1))
        inner = next(ones, found[0])  # what is beside a side of 1 has the same stride
        order.insert(0, inner)
        expected = expected * made.shape[inner]
    return order


def _erase(graph: Graph, orphans: list[Node], kept: set[Node]) -> None:
    """Erase those of `orphans` that nobody uses, and what is left without users then."""
    while orphans:
        node = orphans.pop()
        if node._erased or node.users or node in kept or not _may_go(node):
            continue
        orphans += node.all_input_nodes
        graph.erase_node(node)


def _may_go(node: Node) -> bool:
    """Whether nobody misses a node without users: a tangent, or a call without an effect."""
    if node.op == "placeholder":
        return "tangents" in node.name or runs_in_backward(node)
    if node.op != "call_function":
        return False
    op = node.target
    if not isinstance(op, OpOverload):
        return op is operator.getitem
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return op.namespace == "aten" and not (draws or node.is_impure())
