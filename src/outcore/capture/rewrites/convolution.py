"""convolution: make the gradients of a convolution one after the other, to lower peak memory.

torch's op makes the gradients of the weight and of the input in one call, with one kernel each, and
everything that either kernel reads is held throughout. Only the kernel for the weight reads the
input. In two calls, the memory of the input is free before its gradient needs as much
(docs/decisions/0030).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compiler.compat import SIGNALS, layout_if_input_unread, suggest_memory_format
from outcore.capture.rewrites.metadata_only import (
    INPUT,
    Sites,
    args_of,
    define,
    lying,
    stand_in,
    with_memory,
)

BACKWARD = torch.ops.aten.convolution_backward.default


def one_by_one(joint: GraphModule, sites: Sites) -> None:
    """Split the gradients of convolutions in `joint` into two calls. In place.

    The first call makes the gradients of the weight and the bias, the second that of the input.
    Applies to large inputs, if the kernel for the input's gradient looks only at the input's
    layout. `sites`: the calls of `joint`; if they may be anywhere, they are split as with cuDNN,
    whatever kernels this machine uses. Such a graph must not be run.
    """
    changed, anywhere = False, sites.anywhere
    for node in joint.graph.find_nodes(op="call_function", target=BACKWARD):
        if _wants_that_of_the_input(node) and sites.is_large(node):
            source = _laid_out(node, anywhere=anywhere)
            if source is not None:
                sites.replaced(node)
                _replace(joint.graph, node, source)
                changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _wants_that_of_the_input(node: Node) -> bool:
    """Whether the gradient of the input is used, and the convolution is not transposed.

    The input of a transposed convolution is its small side.
    """
    args = args_of(node)
    if node.kwargs or len(args) != len(BACKWARD._schema.arguments):
        return False
    *_, transposed, _, _, wanted = args
    taken = {args_of(item)[1] for item in node.users}
    return not transposed and 0 in taken and all(wanted[index] for index in taken)


def _laid_out(node: Node, *, anywhere: bool) -> Tensor | None:
    """The input in the layout that its gradient's kernel expects; None if that may read it."""
    _, source, weight, *settings, _ = args_of(node)
    of, by = source.meta["val"], weight.meta["val"]
    if of.dtype != by.dtype or of.dim() == SIGNALS:
        return None
    lies = suggest_memory_format(of) if anywhere else layout_if_input_unread(of, by, *settings)
    if lies is None:
        return None
    with of.fake_mode:
        laid_out = torch.empty_like(of, memory_format=lies)
    return laid_out if anywhere or _needs_no_memory(laid_out, by, *settings) else None


def _needs_no_memory(source: Tensor, weight: Tensor, *settings: Any) -> bool:
    lies = layout_if_input_unread(source, weight, *settings)
    return lies is not None and source.is_contiguous(memory_format=lies)


def _replace(graph: Graph, node: Node, laid_out: Tensor) -> None:
    """Replace `node` by two calls; the one that reads the input comes first, if it is needed."""
    gradient, source, weight, *settings, wanted = args_of(node)
    described, first = node.meta["val"], None
    with graph.inserting_before(node):
        if any(wanted[1:]):
            rest = gradient, source, weight, *settings, [False, *wanted[1:]]
            first = graph.call_function(BACKWARD, rest)
            first.meta = {**node.meta, "val": (None, *described[1:])}
        second = graph.call_function(
            INPUT_GRADIENT, (gradient, *lying(laid_out), weight, *settings)
        )
    second.meta = {**node.meta, "val": described[0], INPUT: source}
    for item in list(node.users):
        index = args_of(item)[1]
        if index:
            item.args = (first, index)
        else:
            item.replace_all_uses_with(second)
            graph.erase_node(item)
    graph.erase_node(node)


# ---- the second call ----------------------------------------------------------------------------


def _input_gradient(
    gradient: Tensor, sides: Sequence[int], strides: Sequence[int], weight: Tensor, *settings: Any
) -> Tensor:
    """The gradient of the input of a convolution whose layout is `sides` and `strides`."""

    def unread(source: Tensor) -> bool:
        return _needs_no_memory(source, weight, *settings)

    return _made(gradient, stand_in(sides, strides, weight, unread), weight, *settings)


def _described(
    gradient: Tensor, sides: Sequence[int], strides: Sequence[int], weight: Tensor, *settings: Any
) -> Tensor:
    return _made(gradient, with_memory(sides, strides, weight), weight, *settings)


def _made(gradient: Tensor, source: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    made: Tensor = BACKWARD(gradient, source, weight, *settings, [True, False, False])[0]
    return made


def _laid_out_again(node: Node) -> Tensor:
    _, _, _, weight, *settings = args_of(node)
    of: Tensor = node.meta[INPUT].meta["val"]
    lies = layout_if_input_unread(of, weight.meta["val"], *settings)
    return of if lies is None else torch.empty_like(of, memory_format=lies)


INPUT_GRADIENT = define(
    "convolution_input_gradient(Tensor gradient, int[] sides, int[] strides, Tensor weight, "
    "int[]? bias_sides, int[] step, int[] padding, int[] dilation, bool transposed, "
    "int[] output_padding, int groups) -> Tensor",
    _input_gradient,
    _described,
    _laid_out_again,
)
