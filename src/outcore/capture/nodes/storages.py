"""storages: which bytes of a storage each of several inputs covers, if they share it.

Parameters may be views of one flat tensor (`vector_to_parameters`), and arguments the chunks of one
batch. If each counted as the whole storage, a step would seem to need many times what it does.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

ALIGNMENT = 16
"""Bytes of the largest item: parts begin at a multiple, so offsets in any dtype stay whole."""


def parts_of_storages(joint: GraphModule) -> dict[Node, range]:
    """Inputs of a joint graph that share a storage with others -> the bytes that each covers."""
    sharing: dict[int, dict[Node, torch.Tensor]] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if isinstance(storage.nbytes(), int):
                sharing.setdefault(storage._cdata, {})[node] = tensor
    several = (each for each in sharing.values() if len(each) > 1)
    return {node: _aligned(covered_bytes(t)) for each in several for node, t in each.items()}


def covered_bytes(tensor: torch.Tensor) -> range:
    """The bytes of its storage from the first to the last that a tensor reads; may be empty."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return range(start, start)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (int(last) + 1) * tensor.itemsize)


def _aligned(covered: range) -> range:
    return range(covered.start // ALIGNMENT * ALIGNMENT, covered.stop)
