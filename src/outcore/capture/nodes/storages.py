"""storages: which bytes of a storage each of several inputs stands for, if they share it.

Parameters may be views of one flat tensor (`vector_to_parameters`), and arguments the chunks of one
batch. If each counted as the whole storage, a step would seem to need many times what it does. So
each is a buffer of its own, of a part of the storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

ALIGNMENT = 16
"""Bytes of the largest item: parts begin at a multiple, so offsets in any dtype stay whole."""


def parts_of_storages(joint: GraphModule) -> dict[Node, range]:
    """Inputs of a joint graph that share a storage with others -> the bytes that each counts as."""
    sharing: dict[int, dict[Node, torch.Tensor]] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if isinstance(storage.nbytes(), int):
                sharing.setdefault(storage_id(tensor), {})[node] = tensor
    several = (each for each in sharing.values() if len(each) > 1)
    return {node: part for each in several for node, part in _parts(each)}


def _parts(sharing: Mapping[Node, torch.Tensor]) -> Iterator[tuple[Node, range]]:
    """What each of the tensors in one storage covers, and what lies between it and the next.

    If none overlap, the parts add up to the storage.
    """
    covered = {node: covered_bytes(tensor) for node, tensor in sharing.items()}
    order = sorted(covered, key=lambda node: (covered[node].start, covered[node].stop))
    starts = [covered[node].start // ALIGNMENT * ALIGNMENT for node in order]
    starts[0], last = 0, sharing[order[0]].untyped_storage().nbytes()
    for node, start, following in zip(order, starts, (*starts[1:], last), strict=True):
        yield node, range(start, max(covered[node].stop, following))


def storage_id(tensor: torch.Tensor) -> int:
    """What tells the storage of `tensor` from all others, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(made: Any) -> list[torch.Tensor]:
    """The tensors among what a call gets or returns, in any nesting."""
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def covered_bytes(tensor: torch.Tensor) -> range:
    """The bytes of its storage from the first to the last that a tensor reads; may be empty."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return range(start, start)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (int(last) + 1) * tensor.itemsize)
