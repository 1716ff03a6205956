"""pooling: make gradients of pooling and padding without the input, which can then be freed.

torch's ops get the input but use only its layout: a maximum is found by its index, everything else
by its place (docs/decisions/0032).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.compiler.compat import suggest_memory_format
from outcore.capture.rewrites.metadata_only import (
    INPUT,
    Sites,
    args_of,
    define,
    lying,
    stand_in,
    with_memory,
)

DEVICES = ("cpu", "cuda")
"""Devices whose kernels are known not to read the input."""


def from_places(joint: GraphModule, sites: Sites) -> None:
    """Let gradients in `joint` that go by places be made without the input, if large. In place.

    `sites`: the calls of `joint`.
    """
    changed = False
    for theirs, ours in GRADIENTS.items():
        for node in joint.graph.find_nodes(op="call_function", target=theirs):
            if sites.is_large(node) and _reads_nothing(node):
                sites.replaced(node)
                _replace(node, ours)
                changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _reads_nothing(node: Node) -> bool:
    """Whether the kernel of a call is known not to read its input."""
    given = [arg.meta.get("val") for arg in args_of(node)[:2]]
    if node.kwargs or not all(isinstance(tensor, Tensor) for tensor in given):
        return False
    gradient, source = given
    return (
        source.dim() == _dimensions(node.target)
        and (source.dtype, source.device) == (gradient.dtype, gradient.device)
        and _unread(source)
    )


def _unread(source: Tensor) -> bool:
    """Whether kernels neither read an input with this layout nor copy it into another one first."""
    known = source.device.type in DEVICES and source.is_floating_point()
    return known and source.is_contiguous(memory_format=suggest_memory_format(source))


def _dimensions(op: Any) -> int:
    """Dimensions of a batch for this op. For a single sample, CUDA makes a view with one more."""
    return next(sides + 2 for sides in (1, 2, 3) if f"{sides}d" in str(op))


def _replace(node: Node, op: OpOverload) -> None:
    gradient, source, *settings = args_of(node)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(op, (gradient, *lying(source.meta["val"]), *settings))
    made.meta = {**node.meta, INPUT: source}
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


# ---- the ops ------------------------------------------------------------------------------------


def _run(
    theirs: OpOverload,
    gradient: Tensor,
    sides: Sequence[int],
    strides: Sequence[int],
    *settings: Any,
) -> Tensor:
    """Run torch's op with an input that has a layout but no memory."""
    made: Tensor = theirs(gradient, stand_in(sides, strides, gradient, _unread), *settings)
    return made


def _described(
    theirs: OpOverload,
    gradient: Tensor,
    sides: Sequence[int],
    strides: Sequence[int],
    *settings: Any,
) -> Tensor:
    """Run torch's op on fake tensors."""
    made: Tensor = theirs(gradient, with_memory(sides, strides, gradient), *settings)
    return made


def _laid_out(node: Node) -> Tensor:
    found: Tensor = node.meta[INPUT].meta["val"]
    return found


def _defined(theirs: OpOverload) -> OpOverload:
    """Define an op with the name of torch's, which takes the input's shape and strides instead."""
    schema = str(theirs._schema).removeprefix("aten::")
    ours = schema.replace("Tensor self", "int[] sides, int[] strides")
    return define(ours, partial(_run, theirs), partial(_described, theirs), _laid_out)


GRADIENTS = {op: _defined(op) for op in map(aten.resolve, aten.BY_PLACE.values())}
"""torch's op -> outcore's op."""
