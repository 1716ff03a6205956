"""views: describe the views of results that torch has replaced after it traced a graph."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node, map_arg

from outcore import aten
from outcore.capture.nodes.storages import storage_id, tensors_in


def of_what_is_there(joint: GraphModule) -> None:
    """Describe again each view in `joint` that shares no storage with its arguments. In place.

    Where a number is symbolic (`x * float`), torch replaces the op and describes its result anew.
    The views of that result are still described as views of the old one.
    """
    for node in joint.graph.nodes:
        if is_view(node.target) and not _shares(node):
            describe_again(node)


def describe_again(node: Node) -> None:
    """Describe what a call makes of its arguments as they are described now."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    fakes = (t for t in tensors_in(args) if isinstance(t, FakeTensor))
    with next((fake.fake_mode for fake in fakes), nullcontext()):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]  # it is a call


def may_be_view(node: Node) -> bool:
    """Whether a call may return views of its first argument, or selects one of its results."""
    op = node.target
    return op is operator.getitem or (isinstance(op, OpOverload) and aten.may_alias(op))


def is_view(target: Any) -> bool:
    """Whether each call of an op returns views, by its schema. False for what is no op."""
    if not isinstance(target, OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)


def _shares(node: Node) -> bool:
    """Whether all results share the storage of an argument, or there is no argument to share."""
    sources = {storage_id(t) for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))}
    made = map(storage_id, tensors_in(node.meta.get("val")))
    return not sources or sources.issuperset(made)
