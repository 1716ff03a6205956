"""sparse: let gradients that are sparse tensors leave a graph as their indices and values.

A Trace describes memory by strides, so it has no sparse tensors. The gradient of an embedding that
asks for a sparse one is made in the last op before a graph's output. It shares the memory of the
indices and values that it is made of, so making it after the graph needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.rewrites.gradients import MADE, PARTS, cloned


@dataclass(frozen=True, slots=True)
class SparseGradients:
    """Makes a graph's sparse gradients of what `densely` lets it return instead."""

    made: tuple[tuple[int, tuple[Any, ...], dict[str, Any]], ...]
    """For each: its position among the gradients, and the sizes and keywords that it is made with.
    """

    def __call__(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """All gradients, given the values of sparse ones in their places, and then the indices."""
        count = len(found) - len(self.made)
        gradients = list(found[:count])
        for (position, sizes, keywords), indices in zip(self.made, found[count:], strict=True):
            gradients[position] = MADE(*sizes, indices, gradients[position], **keywords)
        return tuple(gradients)


def densely(joint: GraphModule, forward_outputs: int) -> tuple[GraphModule, SparseGradients | None]:
    """Return a copy of `joint` that returns indices and values, and what makes gradients of them.

    The values take the place of the gradient; the indices follow all gradients. Returns `joint`
    itself, and None, if it makes no sparse tensors or uses one.
    """
    output = joint.graph.output_node()
    results: Any = output.args[0]
    gradients = results[forward_outputs:]
    sparse = [node for node in joint.graph.nodes if _is_sparse(node)]
    last = all(node.target is MADE and set(node.users) == {output} for node in sparse)
    if not sparse or not last or len([r for r in gradients if r in sparse]) != len(sparse):
        return joint, None
    graph = Graph()
    new: dict[Node, Node] = {}
    graph.graph_copy(joint.graph, new)
    made = [(i, r) for i, r in enumerate(gradients) if r in sparse]
    parts = {r: [_filled(graph, new[part]) for part in r.args[PARTS:]] for _, r in made}
    kept = [parts[r][1] if r in parts else new.get(r, r) for r in results]
    graph.output([*kept, *(parts[r][0] for _, r in made)]).meta = dict(output.meta)
    described = output.meta.get("desc")
    if described:  # says of each result what it is
        of_made = [each for r, each in zip(results, described, strict=False) if r in parts]
        graph.output_node().meta["desc"] = [*described, *of_made]
    for node in sparse:
        graph.erase_node(new[node])
    making = SparseGradients(tuple((i, r.args[:PARTS], dict(r.kwargs)) for i, r in made))
    return GraphModule(joint, graph), making


def _filled(graph: Graph, part: Node) -> Node:
    """The node of indices or values, copied if they do not fill their memory in order.

    Autograd would copy a gradient that is made of such parts, and no plan would know.
    """
    filled = part.meta["val"].is_contiguous()
    return part if filled else cloned(graph, part, memory_format=torch.contiguous_format)


def _is_sparse(node: Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, Tensor) and made.layout is not torch.strided
