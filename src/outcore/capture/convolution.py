"""Gradients of convolutions one after the other: that takes less memory at once.

torch's op makes the gradients of the weight and of the input in one call, by a kernel each, beside
all that both read. Only the kernel for the weight reads the input. In two calls the memory of the
input is free before its gradient takes as much (docs/decisions/0030).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compat import looked_at_alone

BACKWARD = torch.ops.aten.convolution_backward.default

TRANSPOSED = 4
"""Among the settings of a convolution, which begin with the sides of its bias."""

LEAST_BYTES = 1 << 20
"""Where less would be free earlier it stays one call: two take some microseconds more."""


def one_by_one(joint: GraphModule) -> None:
    """Let the gradients of convolutions in `joint` be made one after the other. In place.

    Those of the weight and the bias come first; where kernels look at no more of the input than how
    it lies, to make the gradient of it.
    """
    changed = False
    for node in joint.graph.find_nodes(op="call_function", target=BACKWARD):
        source = _input_without_memory(node) if _is_large(node) else None
        if source is not None:
            _replace(joint.graph, node, source)
            changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _is_large(node: Node) -> bool:
    """Whether both gradients are wanted, of an input that takes some memory."""
    args = _args(node)
    if node.kwargs or len(args) != len(BACKWARD._schema.arguments):
        return False
    wanted, source = args[-1], args[1].meta["val"]
    known = all(isinstance(n, int) for n in (*source.shape, *source.stride()))
    return wanted[0] and wanted[1] and known and source.nbytes >= LEAST_BYTES


def _input_without_memory(node: Node) -> Tensor | None:
    """How the kernel finds the input that makes the gradient of it; None where it reads that."""
    _, source, weight, *settings, _ = _args(node)
    of, by = source.meta["val"], weight.meta["val"]
    if settings[TRANSPOSED] or of.dtype != by.dtype:  # transposed, it is the small side
        return None
    lies = looked_at_alone(of, by, *settings)
    if lies is None:
        return None
    with of.fake_mode:
        laid_out = torch.empty_like(of, memory_format=lies)
    return laid_out if _needs_no_memory(laid_out, by, *settings) else None


def _needs_no_memory(source: Tensor, weight: Tensor, *settings: Any) -> bool:
    lies = looked_at_alone(source, weight, *settings)
    return lies is not None and source.is_contiguous(memory_format=lies)


def _args(node: Node) -> tuple[Any, ...]:
    """Those of a call, as what they are: its op says."""
    return node.args


def _replace(graph: Graph, node: Node, without_memory: Tensor) -> None:
    """Put two calls in the place of `node`, that which reads the input first."""
    gradient, source, weight, *settings, wanted = _args(node)
    described = node.meta["val"]
    lies = list(without_memory.shape), list(without_memory.stride())
    with graph.inserting_before(node):
        rest = gradient, source, weight, *settings, [False, *wanted[1:]]
        first = graph.call_function(BACKWARD, rest)
        second = graph.call_function(INPUT_GRADIENT, (gradient, *lies, weight, *settings))
    first.meta = {**node.meta, "val": (None, *described[1:])}
    second.meta = {**node.meta, "val": described[0]}
    for item in list(node.users):
        index = _args(item)[1]
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
    """The gradient of the input of a convolution, laid out in those `sides` and `strides`.

    torch's op is given such an input all the same. It has no memory, unless torch has come to take
    another kernel since the graph was captured, which may look for it.
    """
    source = _lying(sides, strides, weight)
    if _needs_no_memory(source, weight, *settings):
        source.untyped_storage().resize_(0)
    return _made(gradient, source, weight, *settings)


def _described(
    gradient: Tensor, sides: Sequence[int], strides: Sequence[int], weight: Tensor, *settings: Any
) -> Tensor:
    return _made(gradient, _lying(sides, strides, weight), weight, *settings)


def _lying(sides: Sequence[int], strides: Sequence[int], weight: Tensor) -> Tensor:
    return torch.empty_strided(sides, strides, dtype=weight.dtype, device=weight.device)


def _made(gradient: Tensor, source: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    made: Tensor = BACKWARD(gradient, source, weight, *settings, [True, False, False])[0]
    return made


NAME = "convolution_input_gradient"
_library = torch.library.Library("outcore", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_library.define(  # type: ignore[no-untyped-call]  # torch's
    f"{NAME}(Tensor gradient, int[] sides, int[] strides, Tensor weight, int[]? bias_sides, "
    "int[] step, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups) "
    "-> Tensor"
)
_library.impl(NAME, _input_gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
torch.library.register_fake(f"outcore::{NAME}", _described, lib=_library)

INPUT_GRADIENT = torch.ops.outcore.convolution_input_gradient.default
