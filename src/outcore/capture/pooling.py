"""Gradients of pooling and padding, made without the input: that need not be there then.

torch's ops are given it, and look at no more of it than how it lies: a maximum is found by its
index, all else by its place alone (docs/decisions/0032).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.compat import suggest_memory_format
from outcore.capture.metadata_only import (
    INPUT,
    args_of,
    define,
    lying,
    stand_in,
    with_memory,
    worth_it,
)

DEVICES = ("cpu", "cuda")
"""Those whose kernels are known to read nothing of the input."""


def from_places(joint: GraphModule, *, anywhere: bool = False) -> None:
    """Let gradients in `joint` that go by places be made without the input, if large. In place.

    `anywhere`: of any size; such a graph is not to be run.
    """
    changed = False
    for theirs, ours in GRADIENTS.items():
        for node in joint.graph.find_nodes(op="call_function", target=theirs):
            if worth_it(args_of(node)[1], anywhere=anywhere) and _reads_nothing(node):
                _replace(node, ours)
                changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _reads_nothing(node: Node) -> bool:
    """Whether the kernel of a call is known to read nothing of its input."""
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
    """Whether kernels read nothing of an input that lies so, nor lay it out otherwise before."""
    known = source.device.type in DEVICES and source.is_floating_point()
    return known and source.is_contiguous(memory_format=suggest_memory_format(source))


def _dimensions(op: Any) -> int:
    """Those of a batch. Of a single sample CUDA makes a view with one more first."""
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
    made: Tensor = theirs(gradient, stand_in(sides, strides, gradient, _unread), *settings)
    return made


def _described(
    theirs: OpOverload,
    gradient: Tensor,
    sides: Sequence[int],
    strides: Sequence[int],
    *settings: Any,
) -> Tensor:
    made: Tensor = theirs(gradient, with_memory(sides, strides, gradient), *settings)
    return made


def _laid_out(node: Node) -> Tensor:
    found: Tensor = node.meta[INPUT].meta["val"]
    return found


def _defined(theirs: OpOverload) -> OpOverload:
    """An op of the same name that takes how the input lies for the input."""
    schema = str(theirs._schema).removeprefix("aten::")
    ours = schema.replace("Tensor self", "int[] sides, int[] strides")
    return define(ours, partial(_run, theirs), partial(_described, theirs), _laid_out)


GRADIENTS = {op: _defined(op) for op in map(aten.resolve, aten.BY_PLACE.values())}
"""torch's op -> ours."""
