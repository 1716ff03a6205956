"""phases: tell which nodes of a joint graph run in the forward call, and which in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from outcore.capture.compiler.compat import runs_in_backward, runs_in_forward
from outcore.capture.nodes.sites import site
from outcore.errors import CaptureError


def arguments(joint: GraphModule) -> tuple[list[Node], list[Node]]:
    """Return the placeholders of the forward call, and those of the backward call (tangents)."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    tangents = [n for n in placeholders if runs_in_backward(n) or "tangents" in n.name]
    return [n for n in placeholders if n not in tangents], tangents


def phases(joint: GraphModule, forward_outputs: int) -> tuple[list[Node], list[Node]]:
    """Return the nodes of the forward and of the backward call, each in graph order.

    The tracer does not tag the backward of a user's autograd.Function. So a node without a tag
    belongs to backward if others are tagged as forward, or if it depends on a tangent. What the
    forward results depend on always belongs to forward. Raises CaptureError for calls of modules
    and methods.
    """
    results: Any = joint.graph.output_node().args[0]
    needed = _ancestors(results[:forward_outputs])
    forward: list[Node] = []
    backward: list[Node] = []
    late = set(arguments(joint)[1])
    tagged = any(map(runs_in_forward, joint.graph.nodes))
    for node in joint.graph.nodes:
        if node.op == "call_function":
            told_late = runs_in_backward(node) or (tagged and not runs_in_forward(node))
            fed_late = not late.isdisjoint(node.all_input_nodes)
            if node not in needed and (told_late or fed_late):
                late.add(node)
                backward.append(node)
            else:
                forward.append(node)
        elif node.op in ("call_module", "call_method"):
            raise CaptureError(reason=f"{node.op} {node.target}", site=site(node))
    return forward, backward


def _ancestors(roots: Sequence[Any]) -> set[Node]:
    """Return `roots` and all nodes that they depend on."""
    seen: set[Node] = set()
    stack = [n for n in roots if isinstance(n, Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen
