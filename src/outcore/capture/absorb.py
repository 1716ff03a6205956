"""What forward makes and only fused kernels of backward read, made again inside of those.

A step's graph saves for backward what each op's derivative reads. Where that comes by elementwise
ops from what is saved anyway, a kernel that reads it can make it as it goes: less is kept, and less
is read. What other ops read (a product of matrices) is left to plans, which weigh what it costs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from outcore.capture.compat import marked_as_backward, mutated_inputs
from outcore.capture.groups import LEAST_BYTES, fusible, is_call_of_op, op_of, readers
from outcore.capture.phases import arguments, phases

MOST_DEEP = 8
"""Elementwise ops in a row that a kernel may do for what it reads."""

SMALL = 16
"""What is so many times smaller than what it helps to make may be saved for that."""


def absorb(joint: GraphModule, forward_outputs: int, least_bytes: int = LEAST_BYTES) -> None:
    """Let kernels of backward make again what comes cheaply from what else they can read. In place.

    Results of `least_bytes` and more. Raises CaptureError as `phases`.
    """
    forward, backward = phases(joint, forward_outputs)
    found = _Absorbed(joint, forward, backward, least_bytes)
    known: dict[Node, Node] = {}
    for node in backward:
        if not is_call_of_op(node):
            continue
        if not fusible(node):
            known = {}  # a new group begins, which makes what it needs itself
            continue
        for read in node.all_input_nodes:
            if found.has(read):
                node.replace_input_with(read, _again(joint.graph, read, node, found, known))
    joint.graph.lint()
    joint.recompile()


class _Absorbed:
    """Which forward results backward makes again."""

    def __init__(
        self, joint: GraphModule, forward: list[Node], backward: list[Node], least_bytes: int
    ) -> None:
        self.late = set(backward)
        self.saved: set[Node] = set()
        """Ops and arguments of the forward call that backward reads, and goes on to read."""
        self.cheap: dict[Node, int] = {}
        """Ops whose result follows from what is saved by elementwise ops: so many in a row."""
        self.absorbed: set[Node] = set()
        output = next(iter(joint.graph.find_nodes(op="output")))
        primals, _ = arguments(joint)
        overwritten = {primals[i] for i in mutated_inputs(output, primals)}
        self.saved.update(n for n in primals if n not in overwritten and self._readers(n))
        for op in forward:
            if not is_call_of_op(op):
                continue
            late = self._readers(op)
            if self._is_cheap(op):
                self.cheap[op] = 1 + max(map(self._deep, op.all_input_nodes), default=0)
                if late and _nbytes(op) >= least_bytes and all(map(fusible, late)):
                    self.absorbed.add(op)
            if late and op not in self.absorbed:
                self.saved.add(op)

    def has(self, node: Node) -> bool:
        """Whether it is, or is a view of, what backward makes again."""
        return op_of(node) in self.absorbed

    def _readers(self, node: Node) -> list[Node]:
        return [reader for reader in readers(node) if reader in self.late]

    def _is_cheap(self, op: Node) -> bool:
        given = op.all_input_nodes
        return (
            _elementwise(op)
            and all(self._is_there(n, op) for n in given)
            and all(self._deep(n) < MOST_DEEP for n in given)
        )

    def _deep(self, node: Node) -> int:
        """How many ops in a row backward would run to make it."""
        source = op_of(node)
        return 0 if source in self.saved else self.cheap.get(source, 0)

    def _is_there(self, node: Node, op: Node) -> bool:
        """Whether a kernel that makes what `op` does can read, or make, `node`."""
        source = op_of(node)
        if source in self.saved or source in self.cheap:
            return True
        small = _nbytes(node) * SMALL <= _nbytes(op)
        return small and source.op == "call_function"


def _again(
    graph: Graph, node: Node, before: Node, found: _Absorbed, known: dict[Node, Node]
) -> Node:
    """The same as `node`, made in backward, ahead of `before`."""
    if op_of(node) in found.saved or op_of(node) not in found.cheap:
        return node
    if node not in known:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda n: _again(graph, n, before, found, known)
        )
        with graph.inserting_before(before):
            known[node] = graph.create_node("call_function", node.target, args, kwargs)
        known[node].meta = marked_as_backward(node.meta)
    return known[node]


def _elementwise(op: Node) -> bool:
    """Whether it makes one tensor, each element from those at its place."""
    made = op.meta.get("val")
    if not fusible(op) or not isinstance(made, Tensor):
        return False
    pointwise = torch.Tag.pointwise in op.target.tags  # type: ignore[union-attr]  # an op
    return pointwise or op.target is torch.ops.aten._to_copy.default


def _nbytes(node: Node) -> int:
    made = node.meta["val"]
    assert isinstance(made, Tensor)  # noqa: S101 - ops that are fused take tensors
    nbytes: int = made.nbytes
    return nbytes
