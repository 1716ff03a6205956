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

from outcore.capture.rewrites.gradients import MADE, PARTS


@dataclass(frozen=True, slots=True)
class SparseGradients:
    """Makes a graph's sparse gradients of what `densely` lets it return instead."""

    made: tuple[tuple[int, tuple[Any, ...], dict[str, Any]], ...]
    """For each in order: its position among the gradients, and the sizes and keywords that it is
    made with."""

    def __call__(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """All gradients, given the others and then the indices and values of each sparse one."""
        first = len(found) - 2 * len(self.made)
        gradients, parts = list(found[:first]), iter(found[first:])
        for position, sizes, keywords in self.made:
            sparse = MADE(*sizes, next(parts), next(parts), **keywords)
            gradients.insert(position, sparse)
        return tuple(gradients)


def densely(joint: GraphModule, forward_outputs: int) -> tuple[GraphModule, SparseGradients | None]:
    """Return a copy of `joint` that returns indices and values, and what makes gradients of them.

    They follow all other gradients. Returns `joint` itself, and None, if it makes no sparse tensors
    or uses one.
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
    for node, copied in new.items():
        copied.meta = dict(node.meta)
    kept = [new.get(r, r) for r in results if r not in sparse]
    made = [(i, r) for i, r in enumerate(gradients) if r in sparse]
    parts = [new[part] for _, r in made for part in r.args[PARTS : PARTS + 2]]
    graph.output([*kept, *parts]).meta = _described(output, sparse, [r for _, r in made])
    for node in sparse:
        graph.erase_node(new[node])
    making = SparseGradients(tuple((i, r.args[:PARTS], dict(r.kwargs)) for i, r in made))
    return GraphModule(joint, graph), making


def _described(output: Node, sparse: Sequence[Node], made: Sequence[Node]) -> dict[str, Any]:
    """The metadata of `output`, which says of each result what it is, for the new results."""
    said = output.meta.get("desc")
    if said is None:
        return dict(output.meta)
    results: Any = output.args[0]
    of = dict(zip(results, said, strict=True))
    kept = [each for r, each in zip(results, said, strict=True) if r not in sparse]
    return {**output.meta, "desc": [*kept, *(of[r] for r in made for _ in range(2))]}


def _is_sparse(node: Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, Tensor) and made.layout is not torch.strided
