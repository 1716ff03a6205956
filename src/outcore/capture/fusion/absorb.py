"""absorb: let fused kernels of backward recompute what forward would otherwise save for them.

A step's graph saves for backward what each op's derivative reads. If elementwise ops derive such a
tensor from what is saved anyway, the kernel that reads it can recompute it on the fly: less is
kept, and less is read. What other ops read (matrix products) is left to plans, which weigh the cost
of recomputing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from outcore.capture.compiler.compat import marked_as_backward, mutated_inputs
from outcore.capture.fusion.continuity import narrows, rough
from outcore.capture.fusion.groups import LEAST_BYTES, fusible, is_elementwise
from outcore.capture.nodes.aliases import is_call_of_op, op_of, readers, tensor_of
from outcore.capture.nodes.phases import arguments, phases

MOST_DEEP = 8
"""The most elementwise ops in a row that a kernel may recompute for one of its arguments."""

SMALL = 16
"""A tensor may be saved for recomputing another one if it is smaller by at least this factor."""


def absorb(joint: GraphModule, forward_outputs: int, least_bytes: int = LEAST_BYTES) -> None:
    """Let kernels of backward recompute forward results that they can derive cheaply. In place.

    Only results of at least `least_bytes` are recomputed. Raises CaptureError as `phases`.
    """
    forward, backward = phases(joint, forward_outputs)
    found = _Absorbed(joint, forward_outputs, forward, backward, least_bytes)
    known: dict[Node, Node] = {}
    for node in filter(is_call_of_op, backward):
        if not fusible(node):
            known = {}  # a new group begins, which recomputes what it needs itself
            continue
        for read in node.all_input_nodes:
            if op_of(read) in found.absorbed:
                node.replace_input_with(read, _again(joint.graph, read, node, found, known))


class _Absorbed:
    """Finds the forward results that backward recomputes (`absorbed`)."""

    def __init__(
        self,
        joint: GraphModule,
        forward_outputs: int,
        forward: Sequence[Node],
        backward: Sequence[Node],
        least_bytes: int,
    ) -> None:
        self.late = set(backward)
        self.saved: set[Node] = set()
        """Forward ops and arguments that backward reads and that stay saved."""
        self.cheap: dict[Node, int] = {}
        """Ops that elementwise ops derive from what is saved -> how many of these in a row."""
        self.absorbed: set[Node] = set()
        output = joint.graph.output_node()
        returned: Any = output.args[0]
        self.returned = {op_of(n) for n in returned[:forward_outputs] if isinstance(n, Node)}
        """Ops whose results the caller gets, and may change unless autograd has saved them."""
        primals, _ = arguments(joint)
        overwritten = {primals[i] for i in mutated_inputs(output, primals)}
        self.saved.update(n for n in primals if n not in overwritten and self._late_readers(n))
        exact = self._exact(backward)
        for op in filter(is_call_of_op, forward):
            late = self._late_readers(op)
            if self._is_cheap(op):
                self.cheap[op] = 1 + max(map(self._deep, op.all_input_nodes), default=0)
                large = tensor_of(op).nbytes >= least_bytes
                if late and large and op not in exact and all(map(fusible, late)):
                    self.absorbed.add(op)
            if late and op not in self.absorbed:
                self.saved.add(op)

    def _late_readers(self, node: Node) -> list[Node]:
        return [reader for reader in readers(node) if reader in self.late]

    def _exact(self, backward: Sequence[Node]) -> set[Node]:
        """Forward ops from which backward derives something that must be exact to the last bit."""
        found: set[Node] = set()
        stack = [op_of(n) for op in backward for n in rough(op)]
        while stack:
            source = stack.pop()
            if source not in found:
                found.add(source)
                if source in self.late:
                    stack += map(op_of, source.all_input_nodes)
        return found

    def _is_cheap(self, op: Node) -> bool:
        """Whether kernels of backward may recompute the op.

        It must be elementwise and continuous, read only what is there, and not be too deep.
        """
        given = op.all_input_nodes
        elementwise = is_elementwise(op) or op.target is torch.ops.aten._to_copy.default
        return (
            elementwise
            and fusible(op)
            and not rough(op)
            and not narrows(op)
            and isinstance(op.meta["val"], torch.Tensor)
            and all(self._is_there(n, op) for n in given)
            and all(self._deep(n) < MOST_DEEP for n in given)
        )

    def _deep(self, node: Node) -> int:
        """How many ops in a row backward would run to recompute the node; 0 if it is saved."""
        source = op_of(node)
        return 0 if source in self.saved else self.cheap.get(source, 0)

    def _is_there(self, node: Node, op: Node) -> bool:
        """Whether a kernel that recomputes `op` could read or recompute its argument `node`."""
        source = op_of(node)
        if source in self.saved or source in self.cheap:
            return True
        small = tensor_of(node).nbytes * SMALL <= tensor_of(op).nbytes
        return small and source.op == "call_function" and source not in self.returned


def _again(
    graph: Graph, node: Node, before: Node, found: _Absorbed, known: dict[Node, Node]
) -> Node:
    """Return `node` recomputed in backward before `before`, or `node` itself if it is saved.

    `known`: what has been recomputed for this group so far.
    """
    if op_of(node) in found.saved or op_of(node) not in found.cheap:
        return node
    if node not in known:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda n: _again(graph, n, before, found, known)
        )
        with graph.inserting_before(before):
            made = known[node] = graph.create_node("call_function", node.target, args, kwargs)
        made.meta = marked_as_backward(node.meta)
        args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with tensor_of(op_of(node)).fake_mode:  # type: ignore[attr-defined]  # a traced graph has fakes
            made.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]  # a call
    return known[node]
