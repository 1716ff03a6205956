"""batch_norm: let batch normalization run by cuDNN where plain PyTorch uses cuDNN.

On a GPU, plain PyTorch uses cuDNN's kernel if it can. AOTAutograd traces torch's own kernel
instead: above autograd, `cudnn_batch_norm` is decomposed into `native_batch_norm`. That kernel
rounds differently, so gradients would not be those of plain PyTorch. It also has one thread block
per channel, however large the maps are (docs/decisions/0015).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compiler.compat import (
    cudnn_reserve_bytes,
    normalized_by_cudnn,
    suggest_memory_format,
)
from outcore.capture.rewrites.metadata_only import args_of

_aten = torch.ops.aten
WITH_STATISTICS = _aten._native_batch_norm_legit_functional.default
WITHOUT_STATISTICS = _aten._native_batch_norm_legit.no_stats
BACKWARD = _aten.native_batch_norm_backward.default

OUTPUT, MEAN, VARIANCE, RESERVE = range(4)
"""Positions of the results of cuDNN's op. torch's own op has the first three, and no reserve."""


def by_cudnn(joint: GraphModule) -> None:
    """Let batch normalizations in `joint` run by cuDNN if plain PyTorch does so. In place.

    Applies to normalizations that train: with running statistics, or without them (instance
    normalization). The graph's other results are described as before.
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
    """Whether plain PyTorch would hand this normalization to cuDNN, by torch's own decision."""
    if node.kwargs or node.target not in (WITH_STATISTICS, WITHOUT_STATISTICS):
        return False
    *given, training, _, eps = args_of(node)
    if not training or not all(isinstance(each, Node) for each in given):
        return False
    described: list[Tensor] = [each.meta["val"] for each in given]
    of, weight, bias, *statistics = described
    if not all(map(_is_plain, described)):
        return False
    if not all(all(args_of(backward)[-1]) for backward in _backwards(node)):
        return False  # cuDNN computes all gradients or none
    statistics = statistics or [weight, weight]  # without them, torch decides as with any
    return normalized_by_cudnn(of, weight, bias, *statistics, eps=eps)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the shape is known and the layout is what cuDNN's op needs: torch copies others."""
    known = all(isinstance(side, int) for side in tensor.shape)
    return known and tensor.is_contiguous(memory_format=suggest_memory_format(tensor))


def _replace(graph: Graph, node: Node) -> None:
    """Replace `node` by cuDNN's op, and each of its backward ops by cuDNN's backward."""
    of, weight, bias, *statistics, _, momentum, eps = args_of(node)
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
        index = args_of(item)[1]
        item.args = (made, index + (index >= RESERVE))
    for backward in backwards:
        _replace_backward(graph, backward, reserve)
    graph.erase_node(node)


def _reserve(of: Tensor) -> Tensor:
    """A fake tensor for the reserve that cuDNN passes from forward to backward."""
    with of.fake_mode:  # type: ignore[attr-defined]  # a traced graph has fake tensors
        return torch.empty(cudnn_reserve_bytes(of), dtype=torch.uint8, device=of.device)


def _backwards(node: Node) -> Iterator[Node]:
    """Yield the backward ops that read the mean saved by `node`."""
    for item in node.users:
        if item.args[1] == MEAN:
            for user in item.users:
                if user.target is BACKWARD and user.args[5] is item:
                    yield user


def _replace_backward(graph: Graph, backward: Node, reserve: Node) -> None:
    """Replace a backward op by cuDNN's, which also reads `reserve`."""
    gradient, of, weight, mean, variance, *saved, training, eps, wanted = args_of(backward)
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
