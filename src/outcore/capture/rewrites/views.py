"""views: describe the views of results that torch has replaced after it traced a graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node, map_arg
from torch.utils._pytree import tree_leaves


def of_what_is_there(joint: GraphModule) -> None:
    """Describe again each view in `joint` that shares no storage with its arguments. In place.

    Where a number is symbolic (`x * float`), torch replaces the op and describes its result anew.
    The views of that result are still described as views of the old one.
    """
    for node in joint.graph.nodes:
        if is_view(node.target) and not _shares(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
            fakes = (t for t in _tensors(args) if isinstance(t, FakeTensor))
            with next((fake.fake_mode for fake in fakes), nullcontext()):
                node.meta["val"] = node.target(*args, **kwargs)


def is_view(target: Any) -> bool:
    """Whether each call of an op returns views, by its schema. False for what is no op."""
    if not isinstance(target, OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)


def _shares(node: Node) -> bool:
    """Whether all results share the storage of an argument, or there is no argument to share."""
    sources = {_storage(t) for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))}
    return all(_storage(made) in sources for made in _tensors(node.meta.get("val"))) or not sources


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
