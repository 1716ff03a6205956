"""Shells: the forward and backward modules that AOTAutograd gets instead of the real ones.

AOTAutograd only needs their signatures. The forward shell returns the user's outputs, the inputs
that plain PyTorch would save (so that autograd still checks that nobody overwrote them), and one
stand-in (`stand_in.py`): its number identifies the store in which everything else waits for
backward. The bodies of the shells never run, except if compiled autograd is enabled after the graph
was compiled: it copies them into its own graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compiler.stand_in import like_stand_ins


@dataclass(frozen=True, slots=True)
class Shells:
    """The two modules for AOTAutograd."""

    forward: GraphModule
    backward: GraphModule
    saved_inputs: tuple[int, ...]
    """Positions of forward inputs that the forward call returns as saved tensors."""


def shells(
    forward: GraphModule,
    backward: GraphModule,
    forward_outputs: int,
    overwritten: Collection[int],
) -> Shells:
    """Return shells for the in-core modules `forward` and `backward`, which are not changed.

    `overwritten`: positions of inputs that AOTAutograd itself overwrites after the forward call.
    They are not saved: autograd would report the overwrite as an error, for example inside a
    checkpoint.
    """
    primals = forward.graph.find_nodes(op="placeholder")
    results = _results(forward)
    tensors = (n for n in enumerate(primals) if isinstance(n[1].meta.get("val"), torch.Tensor))
    stable = {n for position, n in tensors if position not in overwritten}
    saved = [n for n in results[forward_outputs:] if isinstance(n, Node) and n in stable]
    tangents = _tangents(backward, len(results) - forward_outputs)
    stand_in = _stand_in(primals)
    return Shells(
        _forward(forward, primals, results[:forward_outputs], saved, stand_in),
        _backward(backward, saved, tangents, stand_in),
        tuple(primals.index(n) for n in saved),
    )


def _results(module: GraphModule) -> list[Any]:
    results = module.graph.output_node().args[0]
    assert isinstance(results, list | tuple)  # noqa: S101 - an output node holds a sequence
    return list(results)


def _tangents(backward: GraphModule, saved: int) -> list[Node]:
    return list(backward.graph.find_nodes(op="placeholder"))[saved:]


def _stand_in(primals: list[Node]) -> torch.Tensor:
    """A fake tensor for the stand-in, made in the fake mode in which the graph was traced."""
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in primals)
    mode = next(m for m in modes if m is not None)
    with mode:
        return like_stand_ins()


def _copy(graph: Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _forward(
    module: GraphModule, primals: list[Node], outputs: list[Any], saved: list[Node], fake: Any
) -> GraphModule:
    """Return the forward shell: placeholders in, and nodes with the right metadata out."""
    graph = Graph()
    new = {n: _copy(graph, n) for n in primals}
    made = [_output(graph, new, result) for result in outputs]
    stand_in = graph.call_function(
        torch.ops.aten.empty.memory_format, (list(fake.shape),), {"dtype": fake.dtype}
    )
    stand_in.meta["val"] = fake
    _finish(graph, module, [*made, *(new[n] for n in saved), stand_in])
    return GraphModule(module, graph)


def _output(graph: Graph, new: dict[Node, Node], result: Any) -> Any:
    """Return the placeholder of an input, a constant itself, else a node with the metadata."""
    if not isinstance(result, Node) or result in new:
        return new.get(result, result)
    made = graph.call_function(torch.ops.aten.empty.memory_format, ([1],))
    made.meta = dict(result.meta)
    return made


def _backward(
    module: GraphModule, saved: list[Node], tangents: list[Node], fake: Any
) -> GraphModule:
    """Return the backward shell: saved inputs, the stand-in and tangents in, gradients out."""
    graph = Graph()
    for node in saved:
        _copy(graph, node)
    stand_in = graph.placeholder("stand_in")
    stand_in.meta["val"] = fake
    for node in tangents:
        _copy(graph, node)
    # Any node can represent a gradient. This one reads the stand-in: if the backward call neither
    # used nor returned a saved tensor, AOTAutograd would assume that it may overwrite that tensor,
    # and would then refuse retain_graph.
    gradient = graph.call_function(copied, (stand_in,))
    gradient.meta["val"] = fake
    made = [gradient if isinstance(r, Node) else None for r in _results(module)]
    _finish(graph, module, made)
    return GraphModule(module, graph)


def copied(_: torch.Tensor) -> None:
    """Raise RuntimeError: the body of a backward shell runs only if compiled autograd copied it."""
    raise RuntimeError(  # torch would keep an OutcoreError, and with it the step it came from
        "compiled autograd cannot run the backward call of a graph that outcore compiled "
        "before it was enabled: enable it before the first forward call (the graph then runs "
        "in-core), or set torch._dynamo.config.compiled_autograd = False"
    )


def _finish(graph: Graph, module: GraphModule, results: list[Any]) -> None:
    old = module.graph.output_node()
    output = graph.output(tuple(results))
    output.meta = {k: v for k, v in old.meta.items() if k != "desc"}
    graph.lint()
