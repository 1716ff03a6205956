"""Batch normalisation by the kernel that plain PyTorch takes.

On a GPU that is cuDNN's where it will do. AOTAutograd traces torch's own kernel in its place: above
autograd `cudnn_batch_norm` is described by `native_batch_norm`. That one rounds otherwise, so that
gradients are not those of plain PyTorch, and has a block of threads for each channel, however large
the maps are (docs/decisions/0015).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compat import (
    cudnn_reserve_bytes,
    normalised_by_cudnn,
    suggest_memory_format,
)

_aten = torch.ops.aten
WITH_STATISTICS = _aten._native_batch_norm_legit_functional.default
WITHOUT_STATISTICS = _aten._native_batch_norm_legit.no_stats
BACKWARD = _aten.native_batch_norm_backward.default

OUTPUT, MEAN, VARIANCE, RESERVE = range(4)
"""Results of cuDNN's op. Torch's own has the first three, and no reserve."""


def by_cudnn(joint: GraphModule) -> None:
    """Let batch normalisations of `joint` run by cuDNN where plain PyTorch has it so. In place.

    Of those that train: with running statistics, and of instances, without. The results that the
    graph already had are described as before.
    """
    graph = joint.graph
    changed = False
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_cudnns(node):
            _replace(graph, node)
            changed = True
    if changed:
        graph.lint()
        joint.recompile()


def _is_cudnns(node: Node) -> bool:
    """Whether it is a normalisation that plain PyTorch hands to cuDNN, as torch itself decides."""
    if node.kwargs or node.target not in (WITH_STATISTICS, WITHOUT_STATISTICS):
        return False
    *given, training, _, eps = _args(node)
    if not training or not all(isinstance(each, Node) for each in given):
        return False
    described: list[Tensor] = [each.meta["val"] for each in given]
    of, weight, bias, *statistics = described
    if not all(map(_is_plain, described)):
        return False
    if not all(all(_args(backward)[-1]) for backward in _backwards(node)):
        return False  # cuDNN makes all gradients
    statistics = statistics or [weight, weight]  # without them it decides as with any
    return normalised_by_cudnn(of, weight, bias, *statistics, eps=eps)


def _args(node: Node) -> tuple[Any, ...]:
    """Those of a call, as what they are: its op says."""
    return node.args


def _is_plain(tensor: Tensor) -> bool:
    """Whether its shape is known, and its layout what cuDNN's op demands: else torch copies it."""
    known = all(isinstance(side, int) for side in tensor.shape)
    return known and tensor.is_contiguous(memory_format=suggest_memory_format(tensor))


def _replace(graph: Graph, node: Node) -> None:
    """Put cuDNN's op in the place of `node`, and its backward in that of each backward."""
    of, weight, bias, *statistics, _, momentum, eps = _args(node)
    with graph.inserting_before(node):
        if statistics:
            made = graph.call_function(
                _aten._batch_norm_with_update_functional.default,
                (of, weight, bias, *statistics, momentum, eps),
            )
        else:
            made = graph.call_function(
                _aten.cudnn_batch_norm.default,
                (of, weight, bias, None, None, True, momentum, eps),
            )
        reserve = graph.call_function(operator.getitem, (made, RESERVE))
    described = list(node.meta["val"])
    described.insert(RESERVE, _reserve(of.meta["val"]))
    made.meta = {**node.meta, "val": tuple(described)}
    reserve.meta = {**node.meta, "val": described[RESERVE]}
    backwards = list(_backwards(node))
    for item in list(node.users):
        index = _args(item)[1]
        item.args = (made, index + (index >= RESERVE))
    for backward in backwards:
        _replace_backward(graph, backward, reserve)
    graph.erase_node(node)


def _reserve(of: Tensor) -> Tensor:
    """What cuDNN hands from forward to backward, as torch describes it."""
    with of.fake_mode:  # type: ignore[attr-defined]  # a traced graph has fake tensors
        return torch.empty(cudnn_reserve_bytes(of), dtype=torch.uint8, device=of.device)


def _backwards(node: Node) -> Iterator[Node]:
    """The backward ops that read the mean that `node` saved."""
    for item in node.users:
        if item.args[1] == MEAN:
            for user in item.users:
                if user.target is BACKWARD and user.args[5] is item:
                    yield user


def _replace_backward(graph: Graph, backward: Node, reserve: Node) -> None:
    gradient, of, weight, mean, variance, *saved, training, eps, wanted = _args(backward)
    with graph.inserting_before(backward):
        if mean is None:
            made = graph.call_function(
                _aten.cudnn_batch_norm_backward.default,
                (of, gradient, weight, None, None, *saved, eps, reserve),
            )
        else:
            made = graph.call_function(
                _aten.batch_norm_backward.default,
                (gradient, of, weight, mean, variance, *saved, training, eps, wanted, reserve),
            )
    made.meta = dict(backward.meta)
    backward.replace_all_uses_with(made)
    graph.erase_node(backward)
