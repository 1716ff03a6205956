"""gradients: give gradients memory of their own that torch's tracing lets share it.

Several gradients may be views of one tensor: both of `a.view(-1) + b` are the gradient of the sum.
As the gradient of a parameter, autograd takes a tensor that nobody else holds without a copy.
Gradients of different shapes are tensors of their own, so they would share memory, and what
changes one of them in place, such as clipping, would change the other. In plain PyTorch, and if
both have the same shape, autograd sees another owner and copies. So it does with a result of the
forward call, which the user has, too. Sparse gradients share the memory of their values, also in
plain PyTorch, but with each other alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compiler.compat import marked_as_backward
from outcore.capture.nodes.aliases import root_of
from outcore.capture.rewrites.metadata_only import args_of

MADE = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
"""The op that makes a sparse tensor of indices and values, and shares their memory."""

PARTS = 3
"""Position of the indices among the arguments of `MADE`; the values are next."""


def unshared(joint: GraphModule, forward_outputs: int) -> None:
    """Clone gradients in `joint` in the memory of an earlier one or a forward result. In place."""
    output = joint.graph.output_node()
    results = list(args_of(output)[0])
    made = [r for r in results[forward_outputs:] if isinstance(r, Node) and r.target is MADE]
    first = {root_of(part): r for r in made for part in r.args[PARTS:] if isinstance(part, Node)}
    given = {root_of(r) for r in results[:forward_outputs] if isinstance(r, Node)}
    copies: dict[Node, Node] = {}
    for i, result in enumerate(results[forward_outputs:], forward_outputs):
        if not _may_be_taken(result):
            continue
        root = root_of(result)
        if root not in given and first.setdefault(root, result) is result:
            continue
        if result not in copies:
            with joint.graph.inserting_before(output):
                copies[result] = cloned(joint.graph, result)
        results[i] = copies[result]
    if copies:
        output.args = (results,)
        joint.graph.lint()
        joint.recompile()


def _may_be_taken(result: Any) -> bool:
    """Whether autograd may take over the memory of a gradient.

    If its elements do not fill a stretch of memory one by one, autograd copies it. Graphs with
    symbolic sizes run as torch has them, so those are not looked at: each comparison would be a
    guard.
    """
    made = result.meta.get("val") if isinstance(result, Node) else None
    if not isinstance(made, Tensor) or made.layout is not torch.strided:
        return False
    if not all(isinstance(number, int) for number in (*made.shape, *made.stride())):
        return False
    expected = 1
    for stride, size in sorted(zip(made.stride(), made.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def cloned(graph: Graph, result: Node, **options: Any) -> Node:
    """A node of backward that copies `result`. `options`: as for `torch.clone`."""
    copy = graph.call_function(torch.ops.aten.clone.default, (result,), options)
    copy.meta = marked_as_backward(result.meta)
    with result.meta["val"].fake_mode:
        copy.meta["val"] = result.meta["val"].clone(**options)
    return copy
